// The lists of BlockParams from a mask that a block-sparse method left on the device, for every architecture from sm_80 on.
#include "launch.cuh"
#include "params.cuh"

namespace s2o {

constexpr int LIST_THREADS = 256;

// A warp for each query block, 32 key blocks at a time from the last one that it sees to the first.
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

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_block_lists_launch = {s2o::LIST_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::LIST_THREADS) s2o_block_lists(const __grid_constant__ s2o::BlockListParams p) {
    s2o::list_blocks(p);
}
}
