// Stores accumulator fragments as rows in global memory, through the shared memory of the warp's query rows, which are
// no longer needed.
#pragma once
#include "../online_softmax.cuh"
#include "../pair.cuh"
#include "traits.cuh"

namespace s2o::sm80 {

// Calls f(row of the tile, address of a 16-byte chunk of it, column of its first value) for the rows of a warp, whole
// rows at a time.
template <class X, class F>
__device__ __forceinline__ void for_each_chunk(char* q, F f) {
    const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
    const int chunk = lane % X::ROW_CHUNKS;
#pragma unroll
    for (int i = 0; i < X::WARP_ROWS * X::ROW_CHUNKS / 32; ++i) {
        const int r = warp * X::WARP_ROWS + i * (32 / X::ROW_CHUNKS) + lane / X::ROW_CHUNKS;
        f(r, q + r * X::ROW + ((chunk ^ (r & 7)) << 4), chunk * 8);
    }
}

template <class X>
__device__ __forceinline__ void store_partial(const typename X::Params& p, const WorkItem& w,
                                              const float (&acc)[X::FRAGMENTS][X::HEAD_DIM / 2],
                                              const float (&row_max)[X::FRAGMENTS][2],
                                              const float (&row_sum)[X::FRAGMENTS][2]) {
    const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = warp * X::WARP_ROWS + m * 16 + h * 8 + lane / 4;
            if (row_of<X>(p, w, r) < 0) continue;
            const int64_t row = w.slot * TILE_Q + r;
            if (lane % 4 == 0) split_of(p).partial_state[row] = {row_max[m][h], row_sum[m][h]};
            if (X::ITEMS_MAY_BE_EMPTY && w.steps == 0) continue;  // `merge` ends before the empty parts
            float* out = split_of(p).partial_out + row * X::HEAD_DIM + 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < X::HEAD_DIM / 8; ++i) {
                *reinterpret_cast<float2*>(out + 8 * i) = make_float2(acc[m][4 * i + 2 * h], acc[m][4 * i + 2 * h + 1]);
            }
        }
    }
}

// Rows without keys are zero. `skipped`: whether the rows skipped keys.
template <class X>
__device__ __forceinline__ void store_rows(const typename X::Params& p, const WorkItem& w, char* q,
                                           const float (&acc)[X::FRAGMENTS][X::HEAD_DIM / 2],
                                           const float (&row_max)[X::FRAGMENTS][2],
                                           const float (&row_sum)[X::FRAGMENTS][2], float scale_log2, bool skipped) {
    using T = typename X::T;
    const AttnParams& attn = attn_of(p);
    const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
    const int64_t first_row = int64_t(w.batch_head(attn)) * attn.q_len;
    T* const head_out = static_cast<T*>(attn.out) + w.batch * attn.out_strides.batch + w.head * attn.out_strides.head;

    __syncwarp();
    if constexpr (X::OUTPUT == Output::RESUMED) {
        for_each_chunk<X>(q, [&](int r, char* chunk, int column) {
            const int row = row_of<X>(p, w, r);
            cp_async_16(smem_address(chunk), head_out + max(row, 0) * attn.out_strides.seq + column, row >= 0);
        });
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
    }
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = warp * X::WARP_ROWS + m * 16 + h * 8 + lane / 4;
            const int row = row_of<X>(p, w, r);
            const float mass = row_sum[m][h];
            if (row >= 0 && lane % 4 == 0) {
                if (attn.lse != nullptr) attn.lse[first_row + row] = row_max[m][h] * attn.softmax_scale + logf(mass);
                if constexpr (X::OUTPUT == Output::STATEFUL) {
                    if (p.state != nullptr) p.state[first_row + row] = {row_max[m][h], mass};
                    if (p.out_norm != nullptr) p.out_norm[first_row + row] = SAW_ALL_KEYS;
                }
            }
            const float factor = inverse_mass(mass);
            float window = 0.f;
            if constexpr (X::OUTPUT == Output::RESUMED) {
                if (row >= 0) {
                    const RowState s = p.state[first_row + row];
                    window = s.row_sum * exp2_approx((s.row_max - row_max[m][h]) * scale_log2) * factor;
                }
            }
            char* line = q + r * X::ROW + 4 * (lane % 4);
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < X::ROW_CHUNKS; ++i) {
                auto* word = reinterpret_cast<uint32_t*>(line + ((i ^ (r & 7)) << 4));
                float x = acc[m][4 * i + 2 * h] * factor, y = acc[m][4 * i + 2 * h + 1] * factor;
                if constexpr (X::OUTPUT == Output::RESUMED) {
                    const float2 o = unpack<T>(*word);
                    x = fmaf(o.x, window, x);
                    y = fmaf(o.y, window, y);
                }
                squares = fmaf(x, x, fmaf(y, y, squares));
                *word = pack<T>(x, y);
            }
            if constexpr (X::MAY_STOP) {
                if (p.out_norm != nullptr) {
                    const float norm = skipped ? sqrtf(quad_sum(squares)) : SAW_ALL_KEYS;
                    if (row >= 0 && lane % 4 == 0) p.out_norm[first_row + row] = norm;
                }
            }
        }
    }
    __syncwarp();
    for_each_chunk<X>(q, [&](int r, char* chunk, int column) {
        const int row = row_of<X>(p, w, r);
        if (row >= 0) {
            *reinterpret_cast<uint4*>(head_out + row * attn.out_strides.seq + column) =
                *reinterpret_cast<const uint4*>(chunk);
        }
    });
}

}  // namespace s2o::sm80
