// Exact probe queries (crates/s2o-core/src/probes), for one group of segments after its sparse pass:
//   s2o_probe_choice_*         a probe for each run of `stride` positions and head, and their queries side by side
//   s2o_probes_*, s2o_merge_*  exact attention of these queries, split over the keys
//   s2o_probe_tails_*          per head and segment: the skipped keys' common tail, and the measured error
//   s2o_probe_units            the heads and segments whose error was too large, for another sparse pass
//   s2o_probe_correction_*     adds the tail to the rows that skipped keys, and gives the probes their exact output
//
// A segment has `slots` runs of each head, some without rows. The heads of a KV head share the tiles of the exact
// attention: slot j of segment s of the group and head h is row (s * slots + j) * group + h % group of the KV head.
//
// s2o_tail_queries_*, s2o_probes_* and s2o_merge_* compute a short dense tail: one segment with a run for each position.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

// Sums over the probes of a head and segment, in this order: norm, uncorrected, corrected, skipped_mass, norm * norm,
// norm * corrected and corrected * corrected of ProbeStats, the number of probes and that of their keys.
constexpr int PROBE_SUMS = 9;

struct ProbeParams {
    // attn.q are the probes' queries and attn.out their exact outputs, both (batch, rows, num_kv_heads, head_dim);
    // attn.num_heads is num_kv_heads, attn.q_len is `rows` = group_segments * slots * group, attn.lse is (batch,
    // num_kv_heads, rows). For a dense tail attn.out is that of the call, and split.group is `group`.
    SplitParams split;
    const void* q;           // of the call
    void* out;               // likewise
    const float* lse;        // of the call (batch, num_heads, q_len): of the visited keys
    const float* out_norm;   // as S2oParams::out_norm
    const float* prefix_score;  // as RankingParams::prefix_score
    int32_t* positions;      // (batch, num_heads, group_segments * slots): of the probes
    float* weights;          // likewise: number of queries that the probe stands for; 0: the run has no rows
    float* tail_value;       // (batch, num_heads, segments, head_dim): mean value of the skipped keys
    float* tail_scale;       // (batch, num_heads, segments): skipped mass over the expected mass; 0: do not correct
    double* sums;            // (batch, num_heads, segments, PROBE_SUMS)
    UnitList units;          // of s2o_probe_tails
    int32_t* unit_list;      // (batch * num_heads * segments): written by s2o_probe_units
    int32_t* unit_count;     // likewise
    int32_t* next_pass;      // (batch, num_heads, segments), zero at first: the pass that a unit needs; or null
    int2* repeated;          // (batch, num_heads, segments), zero at first: tiles and number of replaced passes
    const int32_t* tiles_visited;  // as S2oParams::tiles_visited
    Strides q_strides;
    Strides out_strides;
    double max_error;        // relative L2
    double reach;            // an error above reach * max_error needs the last pass
    int32_t num_heads;
    int32_t group;           // num_heads / num_kv_heads
    int32_t q_len;
    int32_t ranked_rows;     // rows of the call before the dense tail
    int32_t stride;
    int32_t slots;           // of a segment
    int32_t segment_len;
    int32_t first_segment;
    int32_t segments;        // of the call
    int32_t group_first;     // segment of the call
    int32_t group_segments;
    int32_t pass;            // that the units have had (s2o_probe_tails) or need (s2o_probe_units)
    int32_t permuted;        // 1: a segment's tiles are cut from its first row
};
constexpr int LAST_PASS = 2;  // over all keys
static_assert(sizeof(ProbeParams) == 488 && offsetof(ProbeParams, q) == 232 && offsetof(ProbeParams, num_heads) == 432,
              "mirrored on the host");

__host__ __device__ inline int offset_of_call(const ProbeParams& p) { return p.split.attn.k_len - p.q_len; }

// Positions of a segment's rows in this call, outside the dense tail; empty if `end` is not after `begin`.
struct Positions {
    int begin, end;
    __host__ __device__ inline Positions(const ProbeParams& p, int segment_of_call) {
        const int64_t start = int64_t(p.first_segment + segment_of_call) * p.segment_len, offset = offset_of_call(p);
        const int64_t stop = start + p.segment_len, last = offset + p.ranked_rows;
        begin = int(start > offset ? start : offset);
        end = int(stop < last ? stop : last);
    }
};

// Positions of a run: slot `slot` of the group.
__host__ __device__ inline Positions run_of(const ProbeParams& p, int slot) {
    Positions rows(p, p.group_first + slot / p.slots);
    const int64_t start = (int64_t(rows.begin / p.stride) + slot % p.slots) * p.stride, stop = start + p.stride;
    if (start > rows.begin) rows.begin = int(start < rows.end ? start : rows.end);
    if (stop < rows.end) rows.end = int(stop);
    return rows;
}

}  // namespace s2o
