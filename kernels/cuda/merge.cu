// Joins the parts of a split kernel. One warp per row, or a block per row (`merge_warps`), whose warps share the parts.
// Grid: ceil(rows of all heads * warps per row / warps of a block).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"
#include "pair.cuh"
#include "params.cuh"

namespace s2o {

constexpr int MERGE_WARPS = 8;
constexpr int MERGE_THREADS = MERGE_WARPS * 32;

// A lane has VECTORS groups of four columns, each 128 columns after the one before.
template <typename T, int VECTORS>
__device__ __forceinline__ void merge_row(const SplitParams& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rows = p.attn.q_len - p.first_row, tile_rows = p.tile_rows;
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t index = (int64_t(blockIdx.x) * MERGE_WARPS + warp) / p.merge_warps;
    if (index >= int64_t(rows) * p.attn.batch * p.attn.num_heads) return;
    const int batch_head = int(index / rows), row = int(index - int64_t(batch_head) * rows);
    // The row in the first split; each following split is `tile_rows` rows further.
    const int64_t part = (int64_t(batch_head) * tiles + row / tile_rows) * p.num_splits * tile_rows + row % tile_rows;

    float row_max = -INFINITY;
    int parts = 0;  // up to the last one with keys
    for (int s = lane; s < p.num_splits; s += 32) {
        const RowState state = p.partial_state[part + s * tile_rows];
        row_max = fmaxf(row_max, state.row_max);
        if (state.row_sum != 0.f) parts = s + 1;
    }
    for (int other = 16; other; other /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, other));
    parts = __reduce_max_sync(0xffffffffu, parts);

    auto column = [&](int i) { return 128 * i + 4 * lane; };
    float4 acc[VECTORS] = {};
    float row_sum = 0.f;
    // No branch and no dependence between the loads, so that several parts are loaded at a time.
#pragma unroll 4
    for (int s = warp % p.merge_warps; s < parts; s += p.merge_warps) {
        const RowState state = p.partial_state[part + s * tile_rows];
        const bool empty = state.row_sum == 0.f;  // the part saw no key; a part with NaN has NaN here
        const float factor = expf((state.row_max - row_max) * p.attn.softmax_scale);
        row_sum = empty ? row_sum : fmaf(state.row_sum, factor, row_sum);
        const float* out = p.partial_out + (part + s * tile_rows) * p.head_dim;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
            if (column(i) < p.head_dim) x = *reinterpret_cast<const float4*>(out + column(i));
            const float4 sum = {fmaf(x.x, factor, acc[i].x), fmaf(x.y, factor, acc[i].y), fmaf(x.z, factor, acc[i].z),
                                fmaf(x.w, factor, acc[i].w)};
            acc[i] = empty ? acc[i] : sum;
        }
    }
    if (p.merge_warps > 1) {
        __shared__ float4 sums[MERGE_WARPS][VECTORS][32];
        __shared__ float row_sums[MERGE_WARPS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) sums[warp][i][lane] = acc[i];
        if (lane == 0) row_sums[warp] = row_sum;
        __syncthreads();
        if (warp > 0) return;
#pragma unroll
        for (int w = 1; w < MERGE_WARPS; ++w) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const float4 x = sums[w][i][lane];
                acc[i] = {acc[i].x + x.x, acc[i].y + x.y, acc[i].z + x.z, acc[i].w + x.w};
            }
            row_sum += row_sums[w];
        }
    }
    const int batch = batch_head / p.attn.num_heads, head = batch_head - batch * p.attn.num_heads;
    const int call_row = p.first_row + row, out_row = call_row / p.group;
    const int out_head = head * p.group + call_row - out_row * p.group;
    T* out = static_cast<T*>(p.attn.out) + batch * p.attn.out_strides.batch + out_head * p.attn.out_strides.head +
             out_row * p.attn.out_strides.seq;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (column(i) >= p.attn.head_dim) continue;
        *reinterpret_cast<uint2*>(out + column(i)) = make_uint2(pack<T>(acc[i].x / row_sum, acc[i].y / row_sum),
                                                               pack<T>(acc[i].z / row_sum, acc[i].w / row_sum));
    }
    if (p.attn.lse != nullptr && lane == 0) {
        p.attn.lse[int64_t(batch_head) * p.attn.q_len + call_row] = row_max * p.attn.softmax_scale + logf(row_sum);
    }
}

template <typename T>
__device__ __forceinline__ void merge_row(const SplitParams& p) {
    if (p.head_dim <= 128) merge_row<T, 1>(p);
    else merge_row<T, 2>(p);
}

}  // namespace s2o

#define S2O_MERGE(name, T)                                                                       \
    extern "C" { __constant__ s2o::LaunchInfo name##_launch = {s2o::MERGE_THREADS, 0, 0, 0, s2o::OVERLAPS}; } \
    extern "C" __global__ void __launch_bounds__(s2o::MERGE_THREADS)                             \
        name(const __grid_constant__ s2o::SplitParams p) {                                       \
        s2o::overlap();                                                                          \
        s2o::merge_row<T>(p);                                                                    \
    }

S2O_MERGE(s2o_merge_bf16, __nv_bfloat16)
S2O_MERGE(s2o_merge_f16, __half)
