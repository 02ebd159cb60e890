// Mean and variance of a segment's queries, and from them the coefficients of the score:
//   score(k) = sum_d (scale mean_d) k_d + (c scale^2 var_d) k_d^2
// The mean part is rounded to the type of the keys, the variance part to bf16. Queries that are not finite are left out,
// because they would spoil the order.
#pragma once
#include <cstdint>

#include "column_moments.cuh"
#include "prefix_scores.cuh"
#include "ranking_params.cuh"

namespace s2o {

// One column of the coefficients from its moment. All threads of the CTA call it.
template <typename T, int D>
__device__ void store_coefficients(const RankingParams& p, uint16_t* out, int d, const Moment& moment) {
    float mean = p.softmax_scale * moment.mean;
    float var = p.second_cumulant * p.softmax_scale * p.softmax_scale * (moment.square / fmaxf(moment.count, 1.f));
    if constexpr (Packed<T>::NARROW_RANGE) {
        // A power of two that puts the largest mean near 1, so that it and means a little smaller are normal f16 numbers.
        __shared__ float largest[MOMENT_THREADS / 32];
        float m = d < D ? fabsf(mean) : 0.f;
#pragma unroll
        for (int x = 16; x; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
        if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = m;
        __syncthreads();
        for (int w = 0; w < MOMENT_THREADS / 32; ++w) m = fmaxf(m, largest[w]);
        const float factor = m > 0.f ? exp2f(fminf(fmaxf(-floorf(log2f(m)), -100.f), 100.f)) : 1.f;
        mean *= factor;
        var *= factor;
    }
    if (d >= D) return;
    reinterpret_cast<T*>(out)[d] = T(mean);
    reinterpret_cast<__nv_bfloat16*>(out)[D + d] = __nv_bfloat16(var);
}

// Grid (num_heads, num_segments, batch * splits), MOMENT_THREADS threads, no dynamic shared memory. Splits share the
// rows of a segment; the CTA that arrives last merges the partial results in the order of the splits. With SCORES, the scores of
// prefix_scores.cuh too.
template <typename T, int D, bool SCORES>
__device__ __forceinline__ void segment_moments(const RankingParams& p) {
    const int splits = gridDim.z / p.batch, head = blockIdx.x, segment = blockIdx.y;
    const int b = blockIdx.z / splits, split = blockIdx.z % splits;
    const int n = p.first_segment + segment;
    if constexpr (!SCORES) {
        if ((blockIdx.x | blockIdx.y | blockIdx.z) == 0) zero_counters(p);
    }
    if (n == 0) return;  // no keys before it
    const SegmentRows rows = segment_rows(p, n);
    const int share = (rows.end - rows.begin + splits - 1) / splits;
    const int begin = rows.begin + split * share, end = min(begin + share, rows.end);
    const T* q = static_cast<const T*>(p.q) + b * p.q_strides.batch + head * p.q_strides.head;

    constexpr int IN_FLIGHT = 4;  // with three or four CTAs on a multiprocessor
    auto row_at = [&](int i) { return q + (begin + i) * p.q_strides.seq; };
    Moment moment;
    if constexpr (SCORES) {
        __shared__ __align__(16) float factors[2 * D];
        const int kv_head = head / (p.num_heads / p.num_kv_heads);
        const PrefixScores<T, D> prefix(prefix_factors_of<D>(p, b, kv_head, segment), factors);
        float* scores = p.prefix_score + (int64_t(b) * p.num_heads + head) * p.q_len + begin;
        moment = column_moment<T, D, IN_FLIGHT>(end - begin, row_at, [&](int first, const uint4 (&words)[IN_FLIGHT]) {
            const float score = prefix.of(words);
            const int row = first + prefix.row_of_lane() * (MOMENT_THREADS * 8 / D);
            if (prefix.is_first() && row < end - begin) scores[row] = score;
        });
    } else {
        moment = column_moment<T, D, IN_FLIGHT>(end - begin, row_at, [](int, const auto&) {});
    }
    const int d = threadIdx.x;
    const int64_t row = (int64_t(b) * p.num_heads + head) * p.num_segments + segment;
    if (splits > 1) {
        constexpr int PARTIAL = 2 * D + 1;
        float* partials = p.partial_moments + row * splits * PARTIAL;
        float* mine = partials + split * PARTIAL;
        if (d < D) {
            mine[d] = moment.mean;
            mine[D + d] = moment.square;
            if (d == 0) mine[2 * D] = moment.count;
        }
        __threadfence();
        __syncthreads();
        __shared__ bool last;
        if (threadIdx.x == 0) last = atomicInc(p.arrivals + row, splits - 1) == uint32_t(splits - 1);
        __syncthreads();
        if (!last) return;
        __threadfence();
        moment = {0, 0, 0};
        if (d < D) {
#pragma unroll 4
            for (int s = 0; s < splits; ++s) {
                const float* other = partials + s * PARTIAL;
                moment.merge({__ldcg(other + 2 * D), __ldcg(other + d), __ldcg(other + D + d)});
            }
        }
    }
    store_coefficients<T, D>(p, static_cast<uint16_t*>(p.coefficients) + coefficient_offset<D>(p, b, head, n), d,
                             moment);
}

}  // namespace s2o
