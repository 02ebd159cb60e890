// The ranking (Algorithm 1). Launches, on one stream; nothing is read back:
//   s2o_moments_*  mean and variance of each segment's queries -> the coefficients of [K | K*K] in the key scores
// and then, as often as the workspace demands,
//   s2o_scores_*   the scores of all keys before each segment, 16 bits each
//   s2o_sort       kv_perm, one CTA per row of scores
// For a query permutation, on the same parameters:
//   s2o_key_guide_*    mean of the first segment's keys
//   s2o_query_order_*  q_perm
//
// A launch works on the segments first_segment .. first_segment + num_segments - 1 of num_heads heads from the pointers
// on. So a workspace too small for all is shared by groups of KV heads (advance k, q and coefficients), and by groups
// of segments only where one KV head does not fit: every group of segments reads the keys again.
//
// Strides are in elements and 64-bit; rows of q and k are 16-byte aligned with their inner dimension contiguous.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

// Keys that share one (factor, offset) pair of their 16-bit scores. Divides segment_len, so no block straddles a
// prefix.
constexpr int SCORE_BLOCK = 64;
// A code is bits 8..23 of a float in [2, 8): one byte permute decodes it. The top code marks a score that is not
// finite.
constexpr float SCORE_CODE_START = 2.f;
constexpr float SCORE_CODE_SPAN = 5.99f;
constexpr uint32_t SCORE_NOT_FINITE = 0xffff;

struct RankingParams {
    const void* q;            // (batch, q_len, num_heads, head_dim)
    const void* k;            // (batch, k_len, num_kv_heads, head_dim)
    int32_t* kv_perm;         // per (batch, head): rows of segments first_segment.. one after the other, row n has n*S
    void* coefficients;       // (batch, num_heads, segment, 3, head_dim), 16 bits each, from coefficient_segment on
    float* partial_moments;   // (batch, num_heads, num_segments, splits, 2*head_dim + 1); unused with one split
    uint32_t* arrivals;       // (batch, num_heads, num_segments), zero at launch and zero again after it; likewise
    uint16_t* scores;         // laid out as kv_perm; the sort overwrites it
    float* score_ranges;      // a pair per SCORE_BLOCK scores: score = pair[0] * code + pair[1]
    int32_t* q_perm;          // (batch, num_heads, q_len): slot r of a segment's rows holds the row that comes there
    float* key_guide;         // (batch, num_kv_heads, head_dim)
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
    int32_t ranked_rows;      // rows from here on are the dense tail: q_perm leaves them in place
    int32_t sort_buckets;     // a power of two, at most 16384, at least 4 for each thread of s2o_sort
    int32_t sort_window;      // entries that s2o_sort places at a time, a multiple of 32, at most 65408
    float softmax_scale;
    float second_cumulant;    // c; 0 ranks by the mean query alone
};
static_assert(sizeof(RankingParams) == 216 && offsetof(RankingParams, batch) == 152, "mirrored on the host");

// Where row n of a head begins.
__host__ __device__ inline int64_t prefix_row(const RankingParams& p, int n) {
    return keys_before(p.first_segment, n, p.segment_len);
}

template <int D>
__device__ __forceinline__ int64_t coefficient_offset(const RankingParams& p, int b, int head, int n) {
    return b * p.coefficient_batch_stride + head * p.coefficient_head_stride +
           int64_t(n - p.coefficient_segment) * (3 * D);
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
