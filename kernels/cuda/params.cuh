// One plain struct per kernel, mirrored by `#[repr(C)]` structs on the host; both sides assert the layouts. Strides are
// in elements and 64-bit, because 1M tokens x heads x head_dim overflows 32 bits. TMA descriptors are separate
// `__grid_constant__` arguments, because their alignment differs between toolkit versions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace s2o {

constexpr int TILE_Q = 128;  // query rows of a tile (B_M)
constexpr int TILE_K = 128;  // keys of a tile (B_N)

struct Strides {
    int64_t batch;
    int64_t seq;
    int64_t head;  // the inner dimension, head_dim, is contiguous
};

// Offset of segment n's order from the order of segment `first`: segment m orders the m * segment_len keys before it.
__host__ __device__ inline int64_t keys_before(int first, int n, int segment_len) {
    return (int64_t(n) * (n - 1) - int64_t(first) * (first - 1)) / 2 * segment_len;
}

// Parameters of every attention kernel; the dense kernel has no others. Queries are the last q_len of k_len positions.
struct AttnParams {
    const void* q;       // (batch, q_len, num_heads, head_dim)
    const void* k;       // (batch, k_len, num_kv_heads, head_dim)
    const void* v;       // as k
    void* out;           // as q
    float* lse;          // (batch, num_heads, q_len): natural log of the softmax mass of the visited keys; or null
    int32_t* next_item;  // one counter, zero at launch
    Strides q_strides;
    Strides k_strides;
    Strides v_strides;
    Strides out_strides;
    int32_t batch;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t q_len;
    int32_t k_len;
    int32_t causal;             // 1: a query sees the keys up to its own position; 0: all keys
    int32_t heads_per_section;  // heads processed together, so that their keys and values stay in L2
    float softmax_scale;        // factor on scores before the softmax
    float cap_scale;            // a score is q . k, or tanh(cap_scale * q . k) in the kernels that cap
    int32_t head_dim;           // the kernel's, or less in kernels that take narrower heads
};
static_assert(sizeof(AttnParams) == 184 && offsetof(AttnParams, q_strides) == 48 && offsetof(AttnParams, batch) == 144,
              "mirrored on the host");

enum StopRule : int32_t { ALL_ROWS = 0, MEAN_RATIO = 1, SUM_RATIO = 2, MAX_WEIGHT = 3, MEAN_WEIGHT = 4 };

// Row state that pass 1 leaves for pass 2. The accumulator itself is left normalised in `out`.
struct RowState {
    float row_max;  // of the unscaled scores
    float row_sum;
};

constexpr float SAW_ALL_KEYS = -1.f;

// Heads and segments of a call, the longest prefixes first: (batch * num_heads + head) * call's segments + segment of
// the call. Null means all.
struct UnitList {
    const int32_t* units;
    const int32_t* count;
};

// S2O on the segments first_segment .. first_segment + num_segments; `attn.causal` is 1. Rows from ranked_rows on
// belong to the dense tail and are not touched.
struct S2oParams {
    AttnParams attn;
    // Per (batch, head): the orders of segments first_segment.., concatenated; segment n has n * segment_len keys.
    const int32_t* kv_perm;
    int64_t kv_perm_head_stride;
    const int32_t* q_perm;   // (batch, num_heads, q_len): slot r of a segment's rows holds the row placed there
    RowState* state;         // (batch, num_heads, q_len): written by pass 1, read by pass 2
    int32_t* tiles_visited;  // (batch, num_heads, call's segments, segment_len / TILE_Q) or null; pass 2: prefix only
    float* out_norm;         // (batch, num_heads, q_len) or null: L2 norms of rows that skipped keys, otherwise SAW_ALL_KEYS
    UnitList units;          // of the segments below
    int32_t segment_len;     // S, a multiple of TILE_Q and TILE_K
    int32_t first_segment;   // counted from position 0
    int32_t num_segments;
    int32_t ranked_rows;     // rows of the call before the dense tail
    float tau;               // 0 never stops
    int32_t stop_rule;       // StopRule
    int32_t literal_frame;   // 1: gain = l' - l across maxima, literally as in Algorithm 3
    int32_t discard;         // 1: drop the triggering tile
};
static_assert(sizeof(S2oParams) == 280 && offsetof(S2oParams, kv_perm) == 184 &&
                  offsetof(S2oParams, segment_len) == 248,
              "mirrored on the host");

// Dense attention of rows first_row .. q_len, in tiles from first_row on, split over the keys: for the dense tail and
// for calls with too few query tiles to fill the device. Each split writes its own softmax state; `merge` joins them.
// `decode` takes one query row, and writes `out` itself if num_splits is 1.
struct SplitParams {
    AttnParams attn;
    float* partial_out;       // (batch, num_heads, row tiles, num_splits, tile_rows, head_dim), not normalised
    RowState* partial_state;  // (batch, num_heads, row tiles, num_splits, tile_rows)
    int32_t first_row;
    int32_t num_splits;
    int32_t tiles_per_split;  // key tiles
    int32_t head_dim;
    int32_t tile_rows;        // TILE_Q; decode: 1
    int32_t merge_warps;      // of a row: 1, or all of a block of `merge`
    int32_t group;            // row i of head h is row i / group of head h * group + i % group in attn.out
};
static_assert(sizeof(SplitParams) == 232 && offsetof(SplitParams, partial_out) == 184, "mirrored on the host");

// Attention on a list of blocks of TILE_Q x TILE_K. Causal blocks are cut at multiples of the ABSOLUTE position.
// A query block without key blocks gets zeros and an lse of -inf.
struct BlockParams {
    AttnParams attn;
    const int32_t* key_blocks;    // each list in DESCENDING order; causal: no block above the diagonal
    const int64_t* block_ranges;  // (batch * num_heads * query blocks, 2): begin and end of each list
};
static_assert(sizeof(BlockParams) == 200 && offsetof(BlockParams, key_blocks) == 184, "mirrored on the host");

// BlockParams and single keys: list i also has the first column_counts[i] of its `columns`, which are keys before the
// query block's first query and in none of its key blocks. Causal.
struct ColumnParams {
    BlockParams block;
    const int32_t* columns;        // (lists, column_stride), padded with any keys to the next multiple of TILE_K
    const int32_t* column_counts;  // (lists)
    int64_t column_stride;         // a multiple of TILE_K
};
static_assert(sizeof(ColumnParams) == 224 && offsetof(ColumnParams, columns) == 200, "mirrored on the host");

// Converts a mask of blocks to the lists of BlockParams. Key blocks that a query block does not see are left out.
struct BlockListParams {
    const uint8_t* mask;    // (num_lists, mask_blocks): nonzero for chosen key blocks
    int32_t* key_blocks;    // as many entries as the mask
    int64_t* block_ranges;  // (num_lists, 2)
    int32_t num_lists;      // batch * num_heads * query_blocks
    int32_t query_blocks;
    int32_t mask_blocks;    // key blocks of the call
    int32_t first_tile;     // absolute index of the call's first query block
    int32_t causal;
};
static_assert(sizeof(BlockListParams) == 48 && offsetof(BlockListParams, num_lists) == 24, "mirrored on the host");

// Converts the chosen keys of each head to the columns of ColumnParams.
struct ColumnListParams {
    const uint8_t* keys;     // (heads, k_len): nonzero for chosen keys
    const uint8_t* mask;     // (heads, query_blocks, mask_blocks): keys of these blocks are not listed
    int32_t* head_columns;   // (heads, column_stride): the chosen keys of a head, ascending
    int32_t* head_counts;    // (heads)
    int32_t* columns;        // (heads * query_blocks, column_stride)
    int32_t* column_counts;  // (heads * query_blocks)
    int64_t column_stride;   // a multiple of TILE_K; keys of a head beyond it are left out
    int32_t k_len;
    int32_t query_blocks;
    int32_t mask_blocks;
    int32_t num_lists;       // heads * query_blocks
    int32_t q_offset;        // position of the call's first query
};
static_assert(sizeof(ColumnListParams) == 80 && offsetof(ColumnListParams, k_len) == 56, "mirrored on the host");

}  // namespace s2o
