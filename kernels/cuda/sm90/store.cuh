// Begin and end of a consumer's item: resumes the softmax state, and stores the result.
#pragma once
#include <cstdint>

#include "../online_softmax.cuh"
#include "../pair.cuh"
#include "../schedule.cuh"
#include "wgmma.cuh"

namespace s2o::sm90 {

// The two rows of a thread, as rows of the call.
struct OutputRows {
    int row[2];
    bool exists[2];
    __device__ __forceinline__ OutputRows(const WorkItem& w, int row0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row[h] = w.q_start + row0 + 8 * h;
            exists[h] = row[h] >= 0 && row[h] < w.row_end;
        }
    }
    // Rows before `first` belong to another sequence.
    __device__ __forceinline__ void begin_at(int first) {
#pragma unroll
        for (int h = 0; h < 2; ++h) exists[h] = exists[h] && row[h] >= first;
    }
};

// Transposes the four words of the four lanes of a quad: lane c gets word c of lanes 0..3. Its own inverse.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int c) {
    uint32_t sent = (c & 1) ? w[0] : w[1];
    uint32_t got = __shfl_xor_sync(0xffffffffu, sent, 1);
    (c & 1) ? w[0] = got : w[1] = got;
    sent = (c & 1) ? w[2] : w[3];
    got = __shfl_xor_sync(0xffffffffu, sent, 1);
    (c & 1) ? w[2] = got : w[3] = got;
    sent = (c & 2) ? w[0] : w[2];
    got = __shfl_xor_sync(0xffffffffu, sent, 2);
    (c & 2) ? w[0] = got : w[2] = got;
    sent = (c & 2) ? w[1] : w[3];
    got = __shfl_xor_sync(0xffffffffu, sent, 2);
    (c & 2) ? w[1] = got : w[3] = got;
}

// Stores row h of this thread's two: `factor` times `acc`, plus `window_factor` times the row's content. A quad owns a
// row, 2 of each 8 columns per lane; after the transposition each lane writes 16 bytes and the quad 64 in a line. Only the
// first `columns` exist. Returns this lane's share of the squared norm.
template <typename T, bool COMBINE, int N>
__device__ __forceinline__ float store_row(const float (&acc)[N], int h, float factor, float window_factor, T* row,
                                           bool exists, int columns) {
    const int c = threadIdx.x & 3;
    float squares = 0.f;
#pragma unroll
    for (int g = 0; g < N / 16; ++g) {
        uint4* at = reinterpret_cast<uint4*>(row + 32 * g + 8 * c);
        uint32_t w[4];
        if constexpr (COMBINE) {
            const uint4 window = exists ? *at : make_uint4(0, 0, 0, 0);
            w[0] = window.x, w[1] = window.y, w[2] = window.z, w[3] = window.w;
            transpose_quad(w, c);
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int i = 16 * g + 4 * b + 2 * h;
            float low = acc[i] * factor, high = acc[i + 1] * factor;
            if constexpr (COMBINE) {
                const float2 window = unpack<T>(w[b]);
                low = fmaf(window_factor, window.x, low);
                high = fmaf(window_factor, window.y, high);
            }
            squares = fmaf(low, low, fmaf(high, high, squares));
            w[b] = pack<T>(low, high);
        }
        transpose_quad(w, c);
        if (exists && 32 * g + 8 * c < columns) *at = make_uint4(w[0], w[1], w[2], w[3]);
    }
    return squares;
}

// Resumes from the row states of pass 1. The quad's sums are added later, so one lane takes the whole sum.
__device__ __forceinline__ void resume(const S2oParams& p, const WorkItem& w, OutputRows& rows,
                                       OnlineSoftmax& softmax) {
    const int64_t head = int64_t(w.batch_head(p.attn)) * p.attn.q_len;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        rows.row[h] = p.q_perm[head + min(rows.row[h], w.row_end - 1)];
        const RowState state = p.state[head + rows.row[h]];
        softmax.row_max[h] = state.row_max;
        softmax.row_sum[h] = threadIdx.x % 4 == 0 ? state.row_sum : 0.f;
    }
}

// `skipped`: whether the rows skipped keys.
template <class X>
__device__ __forceinline__ void store_item(const typename X::Params& p, const WorkItem& w, const OutputRows& rows,
                                           const float (&acc)[X::HEAD_DIM / 2], const OnlineSoftmax& softmax,
                                           float scale_log2, bool skipped) {
    using T = typename X::T;
    const AttnParams& attn = attn_of(p);
    const int lane = threadIdx.x % 32;
    if constexpr (X::OUTPUT == Output::PARTIAL) {
        const SplitParams& parts = split_of(p);
        const int row0 = (threadIdx.x / 32 - WARPGROUP / 32) * 16 + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int64_t row = w.slot * TILE_Q + row0 + 8 * h;
            if (lane % 4 == 0) parts.partial_state[row] = {softmax.row_max[h], softmax.row_sum[h]};
            if (X::ITEMS_MAY_BE_EMPTY && w.steps == 0) continue;  // `merge` ends before the empty parts
            float* out = parts.partial_out + row * X::HEAD_DIM + 2 * (lane % 4);
#pragma unroll
            for (int i = 0; i < X::HEAD_DIM / 8; ++i) {
                *reinterpret_cast<float2*>(out + 8 * i) = make_float2(acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]);
            }
        }
    } else {
        T* out = static_cast<T*>(attn.out) + w.batch * attn.out_strides.batch + w.head * attn.out_strides.head;
        const int64_t head = int64_t(w.batch_head(attn)) * attn.q_len;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // Rows are zero if the block list is empty.
            const float inverse = X::ITEMS_MAY_BE_EMPTY && w.steps == 0 ? 0.f : 1.f / softmax.row_sum[h];
            float window_factor = 0.f;
            if constexpr (X::PERMUTES_QUERIES) {
                const RowState state = p.state[head + rows.row[h]];
                window_factor =
                    state.row_sum * exp2_approx((state.row_max - softmax.row_max[h]) * scale_log2) * inverse;
            }
            const float squares = store_row<T, X::PERMUTES_QUERIES>(
                acc, h, inverse, window_factor, out + rows.row[h] * attn.out_strides.seq, rows.exists[h],
                X::NARROW_HEADS ? attn.head_dim : X::HEAD_DIM);
            if constexpr (X::MAY_STOP) {
                if (p.out_norm != nullptr) {
                    const float norm = skipped ? sqrtf(quad_sum(squares)) : SAW_ALL_KEYS;
                    if (rows.exists[h] && lane % 4 == 0) p.out_norm[head + rows.row[h]] = norm;
                }
            }
            if (rows.exists[h] && lane % 4 == 0) {
                if (attn.lse != nullptr) {
                    attn.lse[head + rows.row[h]] = softmax.row_max[h] * attn.softmax_scale + logf(softmax.row_sum[h]);
                }
                if constexpr (X::OUTPUT == Output::STATEFUL) {
                    if (p.state != nullptr) p.state[head + rows.row[h]] = {softmax.row_max[h], softmax.row_sum[h]};
                    if (p.out_norm != nullptr) p.out_norm[head + rows.row[h]] = SAW_ALL_KEYS;
                }
            }
        }
    }
}

}  // namespace s2o::sm90
