// What block-sparse methods choose their blocks by, for every architecture from sm_80 on:
//   s2o_block_pool_*     blocks of tokens stood for by their means, and how alike their tokens are
//   s2o_row_choice       rows of scores to the mask of what is chosen: top-p or top-k, softmax before it or not
//   s2o_row_choice_long  the same for rows that no block keeps in its registers, in several launches
//   s2o_row_softmax      the softmax alone
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

// A block for each block of tokens of each head.
struct BlockPoolParams {
    const void* x;         // (batch, len, heads, head_dim)
    const float* centre;   // (batch, heads, head_dim), taken off every token first; or null
    float* means;          // (batch, heads, blocks, head_dim)
    float* alike;          // (batch, heads, blocks): square of the norm of the mean of the normalised tokens; or null
    Strides strides;       // of x
    int64_t offset;        // absolute position of the first token: blocks are cut at multiples of `block`
    int64_t len;
    int64_t block;         // tokens
    int32_t heads;
    int32_t blocks;        // of the call
};
static_assert(sizeof(BlockPoolParams) == 88 && offsetof(BlockPoolParams, strides) == 32 &&
                  offsetof(BlockPoolParams, heads) == 80,
              "mirrored on the host");

// Row r has entry r / each % count of an operand that rows share.
struct RowIndex {
    int32_t each;
    int32_t count;
};

// What a row sees of its columns, and what of that is chosen whatever it scores.
struct RowBounds {
    uint32_t seen;  // the first columns; those behind are never chosen
    uint32_t sink;  // chosen: the first columns,
    uint32_t from;  // and those from here
    uint32_t to;    // to here
};

constexpr int CUT_BINS = 2048;  // of the first digit of a score, its 11 leading bits; the other two have 10
constexpr int CUT_EXPONENTS = 256;

// A long row on the way to its cut, the least score that is chosen.
struct RowCut {
    // What the entries of each digit weigh, then the kept ones by exponent. Integers, and so the same in any order: a
    // count, or a sum of fractions of one exponent. Zero before the first launch, and after the last.
    unsigned long long bins[CUT_BINS + CUT_EXPONENTS];
    double wanted;
    double above;       // what entries with larger leading bits weigh
    float cut;
    uint32_t leading;   // bits of the cut that are known
    uint32_t known;     // 1: the cut
    uint32_t arrivals;  // blocks of a launch that are through; zero as the bins are
};
static_assert(sizeof(RowCut) == 18464, "mirrored on the host");

// Hidden entries, not seen or not trusted, have no part in softmax, sum or count. Operands that are not there are null.
struct RowParams {
    const float* scores;      // (rows, row_len), non-negative without a softmax
    uint8_t* mask;            // the choices: (rows, ceil(row_len / merged)), 1 where an entry is chosen
    float* weights;           // the softmax: (rows, row_len), zeros where hidden; may be `scores`
    const float* left_out;    // the share of a row's sum that need not be chosen; 0 or less chooses all that is seen
    const float* counts;      // (rows): how many are chosen; this or `left_out`
    const RowBounds* bounds;  // not given: all is seen
    const uint8_t* trusted;   // rows of row_len: 0 hides an entry and chooses it
    const uint8_t* kept;      // rows of row_len: not 0 chooses an entry whatever it scores
    const uint8_t* whole;     // not 0 chooses all that a row sees
    const uint8_t* asked;     // 0 chooses no more of a row than is kept
    RowCut* cuts;             // a long row each
    RowIndex left_out_of;
    RowIndex bounds_of;
    RowIndex trusted_of;
    RowIndex kept_of;
    RowIndex whole_of;
    RowIndex asked_of;
    int32_t row_len;          // at most 2^30
    int32_t rows;             // from first_row on, those of the launch
    int32_t first_row;
    int32_t softmax;          // 1: of the scores times `scale`
    float scale;
    int32_t kept_first;       // 1: what is kept or in bounds counts, before all else; 0: it is chosen beside the choice
    int32_t merged;           // 1, or 2: columns 2i and 2i+1 are one of the mask, chosen if either is
    int32_t pass;             // of a long row: 0, 1 and 2 find a digit of the cut, 3 writes the mask
};
static_assert(sizeof(RowParams) == 168 && offsetof(RowParams, left_out_of) == 88 && offsetof(RowParams, row_len) == 136,
              "mirrored on the host");

}  // namespace s2o
