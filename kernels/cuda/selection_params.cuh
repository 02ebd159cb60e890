// Kernels that choose blocks for the block-sparse methods, for sm_80 and newer:
//   s2o_block_pool_*     means of blocks of tokens, and their self-similarity
//   s2o_row_choice       top-p or top-k of rows of scores, as a mask, with or without a softmax first
//   s2o_row_choice_long  the same for rows too long for the registers of a block, in several launches
//   s2o_row_softmax      the softmax alone
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

// One thread block per head and block of tokens.
struct BlockPoolParams {
    const void* x;           // (batch, len, heads, head_dim)
    const float* centre;     // (batch, heads, head_dim), subtracted from every token first; or null
    float* means;            // (batch, heads, blocks, head_dim)
    float* self_similarity;  // (batch, heads, blocks): square of the norm of the mean of the normalised tokens; or null
    Strides strides;         // of x
    int64_t offset;          // absolute position of the first token; blocks are cut at multiples of `block`
    int64_t len;
    int64_t block;           // tokens
    int32_t heads;
    int32_t blocks;          // of the call
};
static_assert(sizeof(BlockPoolParams) == 88 && offsetof(BlockPoolParams, strides) == 32 &&
                  offsetof(BlockPoolParams, heads) == 80,
              "mirrored on the host");

// Row r reads entry r / each % count of an operand that rows share.
struct RowIndex {
    int32_t each;
    int32_t count;
};

// Only columns 0..seen of a row may be chosen; 0..sink and from..to always are.
struct RowBounds {
    uint32_t seen, sink, from, to;
};

constexpr int DIGIT_BINS = 2048;  // for a score's first digit, its 11 leading bits; the other two digits have 10
constexpr int EXPONENT_BINS = 256;

// State of the search for a long row's threshold, the least score that is chosen.
struct RowThreshold {
    // Weight of the entries by digit value, then of the forced entries by exponent: a count, or a sum of fractions of
    // one exponent. Integer sums do not depend on the order. Zero before the first launch and after the last.
    unsigned long long bins[DIGIT_BINS + EXPONENT_BINS];
    double wanted;
    double above;       // weight of the entries with larger leading bits
    float threshold;
    uint32_t leading;   // known leading bits of the threshold
    uint32_t found;     // 1: the threshold is known
    uint32_t arrivals;  // finished blocks of the launch; zero when the bins are zero
};
static_assert(sizeof(RowThreshold) == 18464, "mirrored on the host");

// Hidden entries (not seen or not scored) do not contribute to softmax, sum or count. Absent operands are null.
struct RowParams {
    const float* scores;         // (rows, row_len), non-negative without a softmax
    uint8_t* mask;               // (rows, ceil(row_len / merged_columns)): 1 for chosen entries
    float* weights;              // the softmax: (rows, row_len), zero for hidden entries; may be `scores`
    const float* left_out;       // share of a row's sum that need not be chosen; 0 or less chooses all seen entries
    const float* counts;         // (rows): number of entries to choose; either this or `left_out`
    const RowBounds* bounds;     // null: all columns are seen
    const uint8_t* scored;       // rows of row_len: 0 hides an entry and chooses it
    const uint8_t* forced;       // rows of row_len: nonzero chooses an entry regardless of its score
    const uint8_t* select_all;   // nonzero chooses all entries that a row sees
    const uint8_t* enabled;      // 0 chooses only the forced entries of a row
    RowThreshold* thresholds;    // one per long row
    RowIndex left_out_of;
    RowIndex bounds_of;
    RowIndex scored_of;
    RowIndex forced_of;
    RowIndex select_all_of;
    RowIndex enabled_of;
    int32_t row_len;             // at most 2^30
    int32_t rows;                // rows of the launch, beginning at first_row
    int32_t first_row;
    int32_t softmax;             // 1: apply a softmax to the scores times `scale`
    float scale;
    int32_t forced_count_first;  // 1: forced entries count first; 0: they are chosen in addition
    int32_t merged_columns;      // 1, or 2: columns 2i and 2i+1 share a mask entry, set if either is chosen
    int32_t pass;                // for long rows: 0, 1 and 2 find a digit of the threshold, 3 writes the mask
};
static_assert(sizeof(RowParams) == 168 && offsetof(RowParams, left_out_of) == 88 && offsetof(RowParams, row_len) == 136,
              "mirrored on the host");

}  // namespace s2o
