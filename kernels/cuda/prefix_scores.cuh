// An estimate of the mean weight of the keys before a segment for each of its queries, from their mean and variance:
//   log mean_k exp(score(q, k)) ~ sum_d (scale mean_d) q_d + (c scale^2 var_d) q_d^2
// It is the score of the ranking with queries and keys exchanged. As crates/s2o-core/src/probes/expected.rs.
#pragma once
#include "column_moments.cuh"
#include "probe_rows.cuh"

namespace s2o {

constexpr int SAMPLED_KEYS = 256;  // at most, evenly spaced

// Grid (num_kv_heads, segments of the group, batch), MOMENT_THREADS threads: the factors of q_d, then those of q_d^2.
template <typename T, int D>
__device__ __forceinline__ void prefix_factors(const ProbeParams& p) {
    const AttnParams& attn = p.split.attn;
    const int kv_head = blockIdx.x, segment = blockIdx.y, batch = blockIdx.z, d = threadIdx.x;
    const int64_t keys = int64_t(p.first_segment + p.group_first + segment) * p.segment_len;
    if (keys == 0) return;
    const int count = int(keys < SAMPLED_KEYS ? keys : SAMPLED_KEYS);
    const T* k = static_cast<const T*>(attn.k) + batch * attn.k_strides.batch + kv_head * attn.k_strides.head;
    const Moment moment =
        column_moment<T, D>(count, [&](int i) { return k + i * keys / count * attn.k_strides.seq; });
    if (d >= D) return;
    float* factors = p.prefix_factors + ((int64_t(batch) * attn.num_kv_heads + kv_head) * p.group_segments + segment) * (2 * D);
    const float variance = moment.square / fmaxf(moment.count, 1.f);
    factors[d] = p.score_scale * moment.mean;
    factors[D + d] = p.second_cumulant * p.score_scale * p.score_scale * variance;
}

// Grid (blocks for the positions of the group, batch * num_heads), PROBE_THREADS threads.
template <typename T, int D>
__device__ __forceinline__ void prefix_scores(const ProbeParams& p) {
    constexpr int VECTORS = D / 8, ROWS = PROBE_THREADS / VECTORS, STEPS = POSITIONS_OF_BLOCK / ROWS;
    const BlockPositions block(p);
    const int segment = block.segment - p.group_first, batch_head = blockIdx.y, i = threadIdx.x % VECTORS;
    if (p.first_segment + block.segment == 0) return;
    const int batch = batch_head / p.num_heads, head = batch_head - batch * p.num_heads;
    const int64_t kv_head = int64_t(batch) * p.split.attn.num_kv_heads + head / p.group;
    const int64_t first = batch * p.q_strides.batch + head * p.q_strides.head;
    uint4 words[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int row = block.row(p, s * ROWS + int(threadIdx.x) / VECTORS);
        words[s] = *vector_at(p.q, first + (row < 0 ? 0 : row) * p.q_strides.seq, i);
    }
    float linear[8], square[8];
    const float* factors = p.prefix_factors + (kv_head * p.group_segments + segment) * (2 * D) + 8 * i;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        *reinterpret_cast<float4*>(linear + j) = *reinterpret_cast<const float4*>(factors + j);
        *reinterpret_cast<float4*>(square + j) = *reinterpret_cast<const float4*>(factors + D + j);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint32_t pairs[4] = {words[s].x, words[s].y, words[s].z, words[s].w};
        float score = 0.f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 q = unpack<T>(pairs[j]);
            score = fmaf(fmaf(square[2 * j], q.x, linear[2 * j]), q.x, score);
            score = fmaf(fmaf(square[2 * j + 1], q.y, linear[2 * j + 1]), q.y, score);
        }
#pragma unroll
        for (int x = VECTORS / 2; x; x /= 2) score += __shfl_xor_sync(~0u, score, x);
        const int row = block.row(p, s * ROWS + int(threadIdx.x) / VECTORS);
        if (i == 0 && row >= 0) p.prefix_score[call_row(p, batch_head, row)] = score;
    }
}

}  // namespace s2o
