// An estimate of the mean weight of the keys before a segment for each of its queries, from their mean and variance:
//   log mean_k exp(score(q, k)) ~ sum_d (scale mean_d) q_d + (c scale^2 var_d) q_d^2
// It is the score of the ranking with queries and keys exchanged. As crates/s2o-core/src/probes/expected.rs.
#pragma once
#include "column_moments.cuh"
#include "ranking_params.cuh"

namespace s2o {

constexpr int SAMPLED_KEYS_LOG2 = 8;
constexpr int SAMPLED_KEYS = 1 << SAMPLED_KEYS_LOG2;  // at most, evenly spaced
constexpr float PREFIX_SECOND_CUMULANT = 0.35f;       // for any order of the keys

template <int D>
__device__ __forceinline__ float* prefix_factors_of(const RankingParams& p, int batch, int kv_head, int segment) {
    return p.prefix_factors + ((int64_t(batch) * p.num_kv_heads + kv_head) * p.num_segments + segment) * (2 * D);
}

// Grid (num_kv_heads, num_segments, batch), MOMENT_THREADS threads: the factors of q_d, then those of q_d^2.
template <typename T, int D>
__device__ __forceinline__ void prefix_factors(const RankingParams& p) {
    const int kv_head = blockIdx.x, segment = blockIdx.y, batch = blockIdx.z, d = threadIdx.x;
    if ((blockIdx.x | blockIdx.y | blockIdx.z) == 0) zero_counters(p);
    const int64_t keys = int64_t(p.first_segment + segment) * p.segment_len;
    if (keys == 0) return;
    const int count = int(keys < SAMPLED_KEYS ? keys : SAMPLED_KEYS);
    const T* k = static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head;
    // Key i * keys / count, without a division of 64-bit numbers for each.
    const int shift = count == SAMPLED_KEYS ? SAMPLED_KEYS_LOG2 : 0;
    const int64_t step = count == SAMPLED_KEYS ? keys : 1;
    const Moment moment = column_moment<T, D, 8>(
        count, [&](int i) { return k + (i * step >> shift) * p.k_strides.seq; }, [](int, const auto&) {});
    if (d >= D) return;
    float* factors = prefix_factors_of<D>(p, batch, kv_head, segment);
    factors[d] = p.softmax_scale * moment.mean;
    factors[D + d] = PREFIX_SECOND_CUMULANT * p.softmax_scale * p.softmax_scale *
                     (moment.square / fmaxf(moment.count, 1.f));
}

// The factors of this thread's eight columns. They are read for each vector of rows, because registers are few.
template <typename T, int D>
struct PrefixScores {
    static constexpr int LANES = D / 8;
    const float4* factors;  // of two columns and of their squares, for each of the lanes of a row

    // Copies the factors to `shared`, which has 2 * D floats, so that neighbouring lanes read neighbouring vectors.
    __device__ __forceinline__ PrefixScores(const float* of_segment, float* shared)
        : factors(reinterpret_cast<const float4*>(shared) + threadIdx.x % LANES) {
        for (int i = threadIdx.x; i < 2 * D; i += MOMENT_THREADS) {
            const int is_square = i / D, column = i % D;
            shared[(column % 8 / 2 * LANES + column / 8) * 4 + 2 * is_square + column % 2] = of_segment[i];
        }
        __syncthreads();
    }

    // The score of row `row_of_lane()` of four.
    __device__ __forceinline__ float of(const uint4 (&words)[4]) const {
        float scores[4] = {};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float4 factor = factors[pair * LANES];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
                const float2 q = Packed<T>::floats(pairs[pair]);
                scores[i] = fmaf(fmaf(factor.z, q.x, factor.x), q.x, scores[i]);
                scores[i] = fmaf(fmaf(factor.w, q.y, factor.y), q.y, scores[i]);
            }
        }
        // Each exchange halves the rows of a lane: five shuffles instead of sixteen.
        const bool high = threadIdx.x & LANES / 2, odd = threadIdx.x & LANES / 4;
        float halves[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            halves[i] = (high ? scores[i + 2] : scores[i]) +
                        __shfl_xor_sync(~0u, high ? scores[i] : scores[i + 2], LANES / 2);
        }
        float score = (odd ? halves[1] : halves[0]) + __shfl_xor_sync(~0u, odd ? halves[0] : halves[1], LANES / 4);
#pragma unroll
        for (int x = LANES / 8; x; x /= 2) score += __shfl_xor_sync(~0u, score, x);
        return score;
    }
    __device__ __forceinline__ static int row_of_lane() { return threadIdx.x % LANES / (LANES / 4); }
    // Several lanes have the same score.
    __device__ __forceinline__ static bool is_first() { return threadIdx.x % (LANES / 4) == 0; }
};

}  // namespace s2o
