// One plain struct per kernel, mirrored by `#[repr(C)]` structs on the host side: both sides assert the sizes.
// TMA descriptors travel beside them as separate `__grid_constant__` arguments, because their alignment differs
// between toolkit versions. Strides are in elements and 64-bit: 1M tokens x heads x head_dim overflows 32 bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace s2o {

constexpr int TILE_Q = 128;  // query rows of a tile (B_M): two warpgroups of 64
constexpr int TILE_K = 128;  // keys of a tile (B_N)

// Dense attention, causal (bottom-right) or not.
struct DenseParams {
    void* out;           // (batch, q_len, num_heads, head_dim), inner dimension contiguous
    float* lse;          // (batch, num_heads, q_len) natural-log softmax mass, or null
    int32_t* next_item;  // one counter, zero at launch
    int64_t out_batch_stride;
    int64_t out_seq_stride;
    int64_t out_head_stride;
    int32_t batch;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t q_len;
    int32_t k_len;
    int32_t causal;
    int32_t heads_per_section;  // heads walked together, so that their keys and values stay in L2
    float softmax_scale;
};
static_assert(sizeof(DenseParams) == 80 && offsetof(DenseParams, batch) == 48, "mirrored on the host");

// S2O, single pass: the causal window of the segment, then the prefix gathered by kv_perm.
struct SparseParams {
    DenseParams dense;        // `causal` is 1
    const void* k;            // the gather reads keys and values without TMA
    const void* v;
    const int32_t* kv_perm;   // per (batch, head): rows of segments first_segment.. one after the other, row n has n*S entries
    int32_t* tiles_visited;   // per (batch, head, query tile), or null
    int64_t k_batch_stride;
    int64_t k_seq_stride;
    int64_t k_head_stride;
    int64_t v_batch_stride;
    int64_t v_seq_stride;
    int64_t v_head_stride;
    int64_t kv_perm_head_stride;
    int32_t segment_len;      // S, a multiple of TILE_Q and TILE_K
    float tau;
};
static_assert(sizeof(SparseParams) == 176 && offsetof(SparseParams, k) == 80, "mirrored on the host");

}  // namespace s2o
