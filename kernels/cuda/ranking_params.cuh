// The ranking (Algorithm 1), launched on one stream; the host reads nothing back:
//   s2o_prefix_factors_*  if there are probes: mean and variance of the keys before each segment; zeroes counters
//   s2o_moments_*  mean and variance of each segment's queries -> the coefficients of [K | K*K] in the key scores; from
//                  the prefix factors prefix_score, for the probes
// then, once for each group that fits in the workspace:
//   s2o_scores_*   the scores of all keys before each segment, 16 bits each
//   s2o_sort       kv_perm, one CTA per row of scores, or several if rows are few
// For a query permutation, on the same parameters:
//   s2o_key_guide_*    mean of the first segment's keys
//   s2o_query_order_*  q_perm
//
// A launch works on segments first_segment .. first_segment + num_segments - 1 of the num_heads heads at the pointers.
// If the workspace is too small for all heads, they go in groups of KV heads (advance k, q and coefficients). Segments
// go in groups only if one KV head does not fit, because every group of segments reads the keys again.
//
// Rows of q and k are 16-byte aligned with their inner dimension contiguous.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

// Keys that share a (factor, offset) pair for their 16-bit scores. Divides segment_len: no block straddles a prefix.
constexpr int SCORE_BLOCK = 64;
// A code is bits 8..23 of a float in [2, 8), decoded by a byte permute. The top code marks a score that is not finite.
constexpr float SCORE_CODE_START = 2.f;
constexpr float SCORE_CODE_SPAN = 5.99f;
constexpr uint32_t SCORE_NOT_FINITE = 0xffff;

struct RankingParams {
    const void* q;            // (batch, q_len, num_heads, head_dim)
    const void* k;            // (batch, k_len, num_kv_heads, head_dim)
    int32_t* kv_perm;         // per (batch, head): rows of segments first_segment.., concatenated; row n has n*S keys
    void* coefficients;       // (batch, num_heads, segment, 2, head_dim), 16 bits each, from coefficient_segment on
    float* partial_moments;   // (batch, num_heads, num_segments, splits, 2*head_dim + 1); unused with one split
    uint32_t* arrivals;       // (batch, num_heads, num_segments), zero before and after s2o_moments; likewise
    uint16_t* scores;         // laid out as kv_perm; the sort overwrites it if it is `buckets` too
    uint16_t* buckets;        // laid out as kv_perm: of each key, four times its bucket; not `scores` if CTAs share a row
    float* score_ranges;      // a pair per SCORE_BLOCK scores: score = pair[0] * code + pair[1]
    int32_t* q_perm;          // (batch, num_heads, q_len): slot r of a segment's rows holds the row placed there
    float* key_guide;         // (batch, num_kv_heads, head_dim)
    float* prefix_factors;    // (batch, num_kv_heads, num_segments, 2, head_dim); unused without prefix_score
    float* prefix_score;      // (batch, num_heads, q_len) or null: estimated log of the mean weight of the keys before
    Strides q_strides;
    Strides k_strides;
    int64_t kv_perm_head_stride;  // a multiple of SCORE_BLOCK
    int64_t coefficient_batch_stride;
    int64_t coefficient_head_stride;
    int32_t batch;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t q_len;
    int32_t k_len;
    int32_t segment_len;      // S, a multiple of 128
    int32_t first_segment;
    int32_t num_segments;
    int32_t coefficient_segment;
    int32_t front_sink;       // tokens 0..front_sink lead every row
    int32_t recent;           // and so do the last `recent` tokens of the row
    int32_t ranked_rows;      // rows from here on are the dense tail, which q_perm leaves in place
    int32_t sort_buckets;     // a power of two, at most 16384, at least 4 for each thread of s2o_sort
    int32_t sort_window;      // entries that s2o_sort places at a time, a multiple of 32, at most 65408
    float softmax_scale;
    float second_cumulant;    // c; 0 ranks by the mean query alone
    int32_t sorted_keys;      // the best of a row, at least 1, to the end of a bucket; the others follow in ascending order
    int32_t zeroed;           // counters from `arrivals` on that s2o_prefix_factors sets to zero, or without probes and with
                              // one split s2o_moments
};
static_assert(sizeof(RankingParams) == 248 && offsetof(RankingParams, batch) == 176 &&
                  offsetof(RankingParams, zeroed) == 244, "mirrored on the host");

// All threads of the first block of the first kernel call it.
__device__ __forceinline__ void zero_counters(const RankingParams& p) {
    for (int i = threadIdx.x; i < p.zeroed; i += blockDim.x) p.arrivals[i] = 0;
}

// Offset of row n in its head.
__host__ __device__ inline int64_t prefix_row(const RankingParams& p, int n) {
    return keys_before(p.first_segment, n, p.segment_len);
}

template <int D>
__device__ __forceinline__ int64_t coefficient_offset(const RankingParams& p, int b, int head, int n) {
    return b * p.coefficient_batch_stride + head * p.coefficient_head_stride +
           int64_t(n - p.coefficient_segment) * (2 * D);
}

// Queries of segment n in this call, as rows of the call.
struct SegmentRows {
    int begin, end;
};
__host__ __device__ inline SegmentRows segment_rows(const RankingParams& p, int n) {
    const int64_t offset = p.k_len - p.q_len, start = int64_t(n) * p.segment_len, stop = start + p.segment_len;
    return {int((start > offset ? start : offset) - offset), int((stop < p.k_len ? stop : p.k_len) - offset)};
}

}  // namespace s2o
