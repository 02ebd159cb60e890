// Parameters of the kernel `flash`, mirrored on the host.
#pragma once
#include "params.cuh"

namespace s2o {

// A window without limit on one side has this size. Positions stay below it, and sums of the two below 2^31.
constexpr int32_t NO_LIMIT = 1 << 30;

// Exact attention with the options of FlashAttention. Without `q_starts`, tensors are (batch, length, heads, head_dim),
// and all sequences have the lengths q_len and k_len. With it they are (rows, heads, head_dim), and sequence b has the
// rows starts[b] to starts[b + 1] of q, and of k and v unless they are in pages. Row i of q is at position i + (keys of
// its sequence) - (its queries).
struct FlashParams {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    int32_t* next_item;       // one counter, zero at launch
    const int32_t* q_starts;  // (batch + 1) or null
    const int32_t* k_starts;  // (batch + 1) if q_starts is not null
    const int32_t* pages;     // (batch, pages_per_sequence) or null: page n of a sequence begins at row pages[n] * page_len
    const int32_t* ranges;    // (batch, num_ranges, 2) or null: positions first to end, which all see each other
    const float* slopes;      // (num_heads) or null: slope * distance is subtracted from the scores
    // (batch, 4) or null: beginning and end in q, and in k, of the sequences whose attention the output already has.
    // The kernel skips a sequence if these are its rows; -1 stands for a sequence that the output does not have.
    const int32_t* done;
    Strides q_strides;
    Strides k_strides;
    Strides v_strides;
    Strides out_strides;
    int32_t batch;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;         // a multiple of 8
    int32_t q_len;            // the longest
    int32_t k_len;
    int32_t q_rows;           // rows that exist, in all sequences or pages; lengths are cut to them
    int32_t k_rows;
    int32_t page_len;
    int32_t pages_per_sequence;
    int32_t num_ranges;
    int32_t left;             // a query sees the keys from its position - left to its position + right, or NO_LIMIT
    int32_t right;
    int32_t heads_per_section;  // heads processed together, so that their keys and values stay in L2
    float softmax_scale;
    float softcap;            // scores become softcap * tanh(score / softcap); 0: they do not
};
static_assert(sizeof(FlashParams) == 248 && offsetof(FlashParams, batch) == 184, "mirrored on the host");

}  // namespace s2o
