// Exact probe queries (crates/s2o-core/src/probes.rs). After the sparse pass over the rows before the dense tail:
//   s2o_probe_queries          positions of the probes, and their queries side by side
//   s2o_probes_*, s2o_merge_*  exact attention of these queries, split over the keys
//   s2o_probe_tails_*          per head and segment: the skipped keys' common tail, and the measured error
//   s2o_probe_units            the heads and segments whose error was too large, for another sparse pass
//   s2o_probe_correction_*     adds the tail to the rows that skipped keys; probes get their exact output
//
// The heads of a KV head are rows of the same tiles: `rows` = probes * group, probe n of head h is row n * group + h %
// group of KV head h / group.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

// Sums over the probes of a head and segment, in this order: squared norms of the exact outputs, squared errors before
// and after the correction (leave one out), skipped mass, and sums of norm * norm, norm * error and error * error.
constexpr int PROBE_SUMS = 7;

struct ProbeParams {
    // attn.q are the probes' queries and attn.out their exact outputs, both (batch, rows, num_kv_heads, head_dim);
    // attn.num_heads is num_kv_heads, attn.q_len is rows, attn.lse is (batch, num_kv_heads, rows).
    SplitParams split;
    const void* q;           // of the call
    void* out;               // likewise
    const float* lse;        // of the call (batch, num_heads, q_len): of the visited keys
    const float* last_gain;  // as S2oParams::last_gain
    int32_t* positions;      // (probes), ascending
    float* tail_value;       // (batch, num_heads, segments, head_dim): mean value of the skipped keys
    float* tail_scale;       // (batch, num_heads, segments): squared skipped mass per last gain; 0: do not correct
    double* sums;            // (batch, num_heads, segments, PROBE_SUMS)
    UnitList units;          // of s2o_probe_tails
    int32_t* unit_list;      // (batch * num_heads * segments): written by s2o_probe_units
    int32_t* unit_count;     // likewise
    int32_t* next_pass;      // (batch, num_heads, segments), zero at first: the pass that a unit needs; or null
    int2* repeated;          // (batch, num_heads, segments), zero at first: tiles and number of passes that were in vain
    const int32_t* tiles_visited;  // as S2oParams::tiles_visited
    Strides q_strides;
    Strides out_strides;
    double max_error;        // relative L2
    double reach;            // an error above reach * max_error needs the last pass
    int32_t num_heads;
    int32_t group;           // num_heads / num_kv_heads
    int32_t q_len;
    int32_t ranked_rows;     // rows of the call before the dense tail
    int32_t probes;          // all in these rows
    int32_t first_run;       // of `stride` positions, each with one probe
    int32_t stride;
    int32_t segment_len;
    int32_t first_segment;
    int32_t segments;        // of the call
    int32_t group_first;     // segments of the call that s2o_probe_units looks at
    int32_t group_segments;
    int32_t pass;            // that the units have had (s2o_probe_tails) or need (s2o_probe_units)
    int32_t permuted;        // 1: a segment's tiles are cut from its first row
};
constexpr int LAST_PASS = 2;  // over all keys
static_assert(sizeof(ProbeParams) == 448 && offsetof(ProbeParams, q) == 208 && offsetof(ProbeParams, num_heads) == 392,
              "mirrored on the host");

}  // namespace s2o
