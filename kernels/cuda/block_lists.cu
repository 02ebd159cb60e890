// Converts masks that a block-sparse method left on the device to the lists of BlockParams and ColumnParams.
#include "launch.cuh"
#include "params.cuh"

namespace s2o {

constexpr int LIST_THREADS = 256;

// One warp per query block takes 32 key blocks at a time, from the last visible block to the first.
__device__ __forceinline__ void list_blocks(const BlockListParams& p) {
    const int list = blockIdx.x * (LIST_THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (list >= p.num_lists) return;
    const int64_t begin = int64_t(list) * p.mask_blocks;
    const int seen = p.causal ? min(p.mask_blocks, p.first_tile + list % p.query_blocks + 1) : p.mask_blocks;
    int count = 0;
    for (int first = (seen - 1) / 32 * 32; first >= 0; first -= 32) {
        const int block = first + lane;
        const bool chosen = block < seen && p.mask[begin + block] != 0;
        const uint32_t warp = __ballot_sync(~0u, chosen);
        if (chosen) p.key_blocks[begin + count + __popc(warp >> lane) - 1] = block;
        count += __popc(warp);
    }
    if (lane == 0) {
        p.block_ranges[2 * list] = begin;
        p.block_ranges[2 * list + 1] = begin + count;
    }
}

// Lists the chosen keys of a head: one block per head, one key per thread at a time.
__device__ __forceinline__ void list_head_columns(const ColumnListParams& p) {
    constexpr int WARPS = LIST_THREADS / 32;
    __shared__ int of_warp[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint8_t* keys = p.keys + int64_t(blockIdx.x) * p.k_len;
    int32_t* columns = p.head_columns + blockIdx.x * p.column_stride;
    int64_t count = 0;
    for (int first = 0; first < p.k_len && count < p.column_stride; first += LIST_THREADS) {
        const int key = first + int(threadIdx.x);
        const bool chosen = key < p.k_len && keys[key] != 0;
        const uint32_t ballot = __ballot_sync(~0u, chosen);
        if (lane == 0) of_warp[warp] = __popc(ballot);
        __syncthreads();
        int before = 0, all = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            before += i < warp ? of_warp[i] : 0;
            all += of_warp[i];
        }
        const int64_t at = count + before + __popc(ballot & ((1u << lane) - 1));
        if (chosen && at < p.column_stride) columns[at] = key;
        count += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.head_counts[blockIdx.x] = int(min(count, p.column_stride));
}

// One warp per query block lists the keys of its head that are before its first query and in none of its key blocks.
__device__ __forceinline__ void list_columns(const ColumnListParams& p) {
    const int list = blockIdx.x * (LIST_THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (list >= p.num_lists) return;
    const int head = list / p.query_blocks, query_block = list % p.query_blocks;
    const int first_query = max(p.q_offset, (p.q_offset / TILE_Q + query_block) * TILE_Q);
    const int32_t* from = p.head_columns + head * p.column_stride;
    int32_t* columns = p.columns + list * p.column_stride;
    const uint8_t* mask = p.mask + int64_t(list) * p.mask_blocks;
    const int available = p.head_counts[head];
    int count = 0;
    for (int first = 0; first < available; first += 32) {
        const int key = first + lane < available ? from[first + lane] : first_query;
        const bool seen = key < first_query && mask[key / TILE_K] == 0;
        const uint32_t warp = __ballot_sync(~0u, seen);
        if (seen) columns[count + __popc(warp & ((1u << lane) - 1))] = key;
        count += __popc(warp);
        if (__all_sync(~0u, key >= first_query)) break;
    }
    // Pads the last tile, because the attention kernel loads whole tiles.
    for (int at = count + lane; at < (count + TILE_K - 1) / TILE_K * TILE_K; at += 32) columns[at] = 0;
    if (lane == 0) p.column_counts[list] = count;
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_block_lists_launch = {s2o::LIST_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::LIST_THREADS) s2o_block_lists(const __grid_constant__ s2o::BlockListParams p) {
    s2o::list_blocks(p);
}

__constant__ s2o::LaunchInfo s2o_head_columns_launch = {s2o::LIST_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::LIST_THREADS)
    s2o_head_columns(const __grid_constant__ s2o::ColumnListParams p) {
    s2o::list_head_columns(p);
}

__constant__ s2o::LaunchInfo s2o_column_lists_launch = {s2o::LIST_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::LIST_THREADS)
    s2o_column_lists(const __grid_constant__ s2o::ColumnListParams p) {
    s2o::list_columns(p);
}
}
