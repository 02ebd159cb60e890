// Joins the parts of a split kernel, one warp per row. Grid: ceil(rows of all heads / warps of a block).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"
#include "params.cuh"

namespace s2o {

constexpr int MERGE_THREADS = 256;

template <typename T>
__device__ __forceinline__ void merge_row(const SplitParams& p) {
    const int lane = threadIdx.x % 32;
    const int rows = p.attn.q_len - p.first_row;
    const int tiles = (rows + TILE_Q - 1) / TILE_Q;
    const int64_t index = int64_t(blockIdx.x) * (MERGE_THREADS / 32) + threadIdx.x / 32;
    if (index >= int64_t(rows) * p.attn.batch * p.attn.num_heads) return;
    const int batch_head = int(index / rows), row = int(index - int64_t(batch_head) * rows);
    // The row in the first split; each following split is TILE_Q rows further.
    const int64_t part = (int64_t(batch_head) * tiles + row / TILE_Q) * p.num_splits * TILE_Q + row % TILE_Q;

    float row_max = -INFINITY;
    for (int s = lane; s < p.num_splits; s += 32) row_max = fmaxf(row_max, p.partial_state[part + s * TILE_Q].row_max);
    for (int other = 16; other; other /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, other));

    float acc[8] = {}, row_sum = 0.f;  // head_dim / 32 of them are used
    for (int s = 0; s < p.num_splits; ++s) {
        const RowState state = p.partial_state[part + s * TILE_Q];
        if (state.row_sum == 0.f) continue;  // the part saw no key; a part with NaN has NaN here
        const float factor = expf((state.row_max - row_max) * p.attn.softmax_scale);
        row_sum = fmaf(state.row_sum, factor, row_sum);
        const float* out = p.partial_out + (part + s * TILE_Q) * p.head_dim;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (lane + 32 * i < p.head_dim) acc[i] = fmaf(out[lane + 32 * i], factor, acc[i]);
        }
    }
    const int batch = batch_head / p.attn.num_heads, head = batch_head - batch * p.attn.num_heads;
    const int call_row = p.first_row + row;
    T* out = static_cast<T*>(p.attn.out) + batch * p.attn.out_strides.batch + head * p.attn.out_strides.head +
             call_row * p.attn.out_strides.seq;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (lane + 32 * i < p.head_dim) out[lane + 32 * i] = T(acc[i] / row_sum);
    }
    if (p.attn.lse != nullptr && lane == 0) {
        p.attn.lse[int64_t(batch_head) * p.attn.q_len + call_row] = row_max * p.attn.softmax_scale + logf(row_sum);
    }
}

}  // namespace s2o

#define S2O_MERGE(name, T)                                                                       \
    extern "C" { __constant__ s2o::LaunchInfo name##_launch = {s2o::MERGE_THREADS, 0, 0, 0}; } \
    extern "C" __global__ void __launch_bounds__(s2o::MERGE_THREADS)                             \
        name(const __grid_constant__ s2o::SplitParams p) {                                       \
        s2o::merge_row<T>(p);                                                                    \
    }

S2O_MERGE(s2o_merge_bf16, __nv_bfloat16)
S2O_MERGE(s2o_merge_f16, __half)
