// Keys and values in another order, and the tokens of each stride made contiguous: copies of whole heads in 16-byte
// pieces, for any 16-bit element type.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"
#include "params.cuh"

namespace s2o {

constexpr int COPY_THREADS = 256;
constexpr int REORDER_ROWS = 8;  // per block: one memory sector of each head's positions

struct ReorderParams {
    const void* k;              // (batch, k_len, num_kv_heads, head_dim)
    const void* v;              // as k
    const uint32_t* positions;  // (batch, num_heads, before)
    void* k_out;                // (batch, before + k_len, num_heads, head_dim)
    void* v_out;                // as k_out
    Strides k_strides;
    Strides v_strides;
    int32_t num_heads;          // a multiple of num_kv_heads
    int32_t num_kv_heads;
    int32_t before;
    int32_t k_len;
    int32_t head_dim;           // a multiple of 8
};
static_assert(sizeof(ReorderParams) == 112 && offsetof(ReorderParams, k_strides) == 40 &&
                  offsetof(ReorderParams, num_heads) == 88,
              "mirrored on the host");

__device__ __forceinline__ uint4 head_piece(const void* base, int64_t element, int piece) {
    return __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(base) + 2 * element) + piece);
}

// Grid (ceil((before + k_len) / REORDER_ROWS), batch): rows of the outputs, all heads.
__device__ __forceinline__ void reorder(const ReorderParams& p) {
    const int pieces = p.head_dim / 8, per_row = p.num_heads * pieces, group = p.num_heads / p.num_kv_heads;
    const int b = blockIdx.y, out_len = p.before + p.k_len, first = blockIdx.x * REORDER_ROWS;
    const int count = min(REORDER_ROWS, out_len - first) * per_row;
    const uint32_t* positions = p.positions + int64_t(b) * p.num_heads * p.before;
    const int64_t out = (int64_t(b) * out_len + first) * per_row;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += COPY_THREADS) {
        const int row = first + i / per_row, head = i % per_row / pieces, piece = i % pieces, kv_head = head / group;
        // Clamped, so that a wrong position reads nothing beyond the keys.
        const int from = row < p.before ? int(min(__ldg(positions + int64_t(head) * p.before + row), p.k_len - 1u))
                                        : row - p.before;
        auto at = [&](const Strides& strides) {
            return b * strides.batch + from * strides.seq + kv_head * strides.head;
        };
        static_cast<uint4*>(p.k_out)[out + i] = head_piece(p.k, at(p.k_strides), piece);
        static_cast<uint4*>(p.v_out)[out + i] = head_piece(p.v, at(p.v_strides), piece);
    }
}

struct StridesParams {
    const void* x;       // (len, num_heads, head_dim)
    void* out;           // (num_heads, slots, head_dim), zeros if x has no token
    int64_t seq_stride;  // of x
    int64_t head_stride;
    int32_t num_heads;
    int32_t len;
    int32_t slots;       // a multiple of stride
    int32_t before;      // slots before the first token
    int32_t stride;      // 0: in order; otherwise reversed in each stride
    int32_t head_dim;    // a multiple of 8
};
static_assert(sizeof(StridesParams) == 56 && offsetof(StridesParams, num_heads) == 32, "mirrored on the host");

constexpr int STRIDES_SLOTS = 64;  // of a block

// Grid (num_heads, ceil(slots / STRIDES_SLOTS)): the heads vary fastest, as in memory.
__device__ __forceinline__ void strides(const StridesParams& p) {
    const int pieces = p.head_dim / 8, head = blockIdx.x, first = blockIdx.y * STRIDES_SLOTS;
    const int count = min(STRIDES_SLOTS, p.slots - first) * pieces;
    uint4* out = static_cast<uint4*>(p.out) + (int64_t(head) * p.slots + first) * pieces;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += COPY_THREADS) {
        const int slot = first + i / pieces, piece = i % pieces;
        const int from = (p.stride == 0 ? slot : slot - slot % p.stride + (p.stride - 1 - slot % p.stride)) - p.before;
        out[i] = from >= 0 && from < p.len ? head_piece(p.x, from * p.seq_stride + head * p.head_stride, piece)
                                           : make_uint4(0, 0, 0, 0);
    }
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_reorder_launch = {s2o::COPY_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::COPY_THREADS) s2o_reorder(const __grid_constant__ s2o::ReorderParams p) {
    s2o::reorder(p);
}
__constant__ s2o::LaunchInfo s2o_strides_launch = {s2o::COPY_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::COPY_THREADS) s2o_strides(const __grid_constant__ s2o::StridesParams p) {
    s2o::strides(p);
}
}
