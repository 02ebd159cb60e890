// Rows of scores in the registers of a warp or a block.
#pragma once
#include <cfloat>

#include "selection_params.cuh"

namespace s2o {

constexpr int ROW_THREADS = 128;    // of a block
constexpr int ROW_VECTOR = 4;       // consecutive entries of a thread
constexpr int WARP_ENTRIES = 2048;  // a warp keeps rows up to here, a block of them
constexpr int BLOCK_ENTRIES = 8192;

// The threads that a row has. Results are those of every thread, in a fixed order of the same numbers.
struct WarpOfRow {
    static constexpr int THREADS = 32;
    static __device__ __forceinline__ int thread() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int row() { return blockIdx.x * (ROW_THREADS / 32) + threadIdx.x / 32; }
    template <class Op>
    static __device__ __forceinline__ float join(float x, Op op) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
        return x;
    }
};

struct BlockOfRow {
    static constexpr int THREADS = ROW_THREADS;
    static __device__ __forceinline__ int thread() { return threadIdx.x; }
    static __device__ __forceinline__ int row() { return blockIdx.x; }
    template <class Op>
    static __device__ __forceinline__ float join(float x, Op op) {
        __shared__ float of_warp[ROW_THREADS / 32];
        x = WarpOfRow::join(x, op);
        __syncthreads();
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
        __syncthreads();
        x = of_warp[0];
#pragma unroll
        for (int i = 1; i < ROW_THREADS / 32; ++i) x = op(x, of_warp[i]);
        return x;
    }
};

struct Larger {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Plus {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Of four accumulators, so that additions need not wait for each other.
template <class Threads>
__device__ __forceinline__ float sum_of(const float (&part)[ROW_VECTOR]) {
    return Threads::join((part[0] + part[1]) + (part[2] + part[3]), Plus());
}

__device__ __forceinline__ int64_t entry_of(const RowIndex& index, int row) { return row / index.each % index.count; }

// One row of the parameters.
struct Row {
    const float* scores;
    const uint8_t* trusted;
    const uint8_t* kept;
    int len;
    int seen;
    int sink, from, to;
    bool aligned;  // entries come four at a time
    bool whole;

    __device__ __forceinline__ Row(const RowParams& p, int row) {
        len = p.row_len;
        scores = p.scores + int64_t(row) * len;
        trusted = p.trusted ? p.trusted + entry_of(p.trusted_of, row) * len : nullptr;
        kept = p.kept ? p.kept + entry_of(p.kept_of, row) * len : nullptr;
        RowBounds bounds = {0, 0, 0, 0};
        if (p.bounds) bounds = p.bounds[entry_of(p.bounds_of, row)];
        seen = p.bounds ? min(uint32_t(len), bounds.seen) : len;
        sink = min(uint32_t(len), bounds.sink);
        from = min(uint32_t(len), bounds.from);
        to = min(uint32_t(len), bounds.to);
        aligned = len % ROW_VECTOR == 0;
        const bool asked = !p.asked || p.asked[entry_of(p.asked_of, row)] != 0;
        whole = (p.whole && p.whole[entry_of(p.whole_of, row)] != 0) ||
                (asked && p.left_out && !(p.left_out[entry_of(p.left_out_of, row)] > 0.f));
    }
};

// Loads of a row are not all moved to its beginning, which would take more registers than there are.
__device__ __forceinline__ void no_load_passes() { asm volatile("" ::: "memory"); }

constexpr int ROW_IN_FLIGHT = 4;  // vectors of a thread

// Entries at .. at + 4 of a row.
struct Vector {
    float score[ROW_VECTOR];
    bool seen[ROW_VECTOR];
    bool trusted[ROW_VECTOR];  // and seen
    bool kept[ROW_VECTOR];     // or in bounds, and seen

    __device__ __forceinline__ Vector(const Row& row, int at, bool with_scores) {
        const bool whole = row.aligned && at < row.seen;
        float4 scores = make_float4(0.f, 0.f, 0.f, 0.f);
        uchar4 trusts = make_uchar4(1, 1, 1, 1), keeps = make_uchar4(0, 0, 0, 0);
        if (whole && with_scores) scores = *reinterpret_cast<const float4*>(row.scores + at);
        if (whole && row.trusted) trusts = *reinterpret_cast<const uchar4*>(row.trusted + at);
        if (whole && row.kept) keeps = *reinterpret_cast<const uchar4*>(row.kept + at);
        const float four_scores[ROW_VECTOR] = {scores.x, scores.y, scores.z, scores.w};
        const uint8_t four_trusts[ROW_VECTOR] = {trusts.x, trusts.y, trusts.z, trusts.w};
        const uint8_t four_keeps[ROW_VECTOR] = {keeps.x, keeps.y, keeps.z, keeps.w};
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) {
            const int column = at + j;
            seen[j] = column < row.seen;
            score[j] = four_scores[j];
            uint8_t trust = four_trusts[j], keep = four_keeps[j];
            if (!row.aligned && seen[j]) {
                if (with_scores) score[j] = row.scores[column];
                if (row.trusted) trust = row.trusted[column];
                if (row.kept) keep = row.kept[column];
            }
            trusted[j] = seen[j] && trust != 0;
            kept[j] = seen[j] && (keep != 0 || column < row.sink || (column >= row.from && column < row.to));
        }
    }
};

// Four consecutive values to where a row of `len` has them.
template <typename Four, typename T>
__device__ __forceinline__ void store_four(T* row, int at, int len, const T (&x)[ROW_VECTOR]) {
    if (len % ROW_VECTOR == 0 && at < len) {
        Four four;
        four.x = x[0], four.y = x[1], four.z = x[2], four.w = x[3];
        *reinterpret_cast<Four*>(row + at) = four;
        return;
    }
#pragma unroll
    for (int j = 0; j < ROW_VECTOR; ++j) {
        if (at + j < len) row[at + j] = x[j];
    }
}

// Columns at .. at + 4 of the mask, which may have half as many.
__device__ __forceinline__ void store_choice(const RowParams& p, int64_t row, int at,
                                             const uint8_t (&chosen)[ROW_VECTOR]) {
    if (p.merged == 1) {
        store_four<uchar4>(p.mask + row * p.row_len, at, p.row_len, chosen);
        return;
    }
    const int len = (p.row_len + 1) / 2;
    uint8_t* out = p.mask + row * len;
    const uint8_t low = chosen[0] | chosen[1], high = chosen[2] | chosen[3];
    if (p.row_len % ROW_VECTOR == 0) {
        *reinterpret_cast<uchar2*>(out + at / 2) = make_uchar2(low, high);
        return;
    }
    if (at / 2 < len) out[at / 2] = low;
    if (at / 2 + 1 < len) out[at / 2 + 1] = high;
}

// Calls `run` with the threads of a row and the entries that each of them keeps; uniform over those threads.
#define S2O_FOR_ENTRIES(run, p)                                                         \
    if ((p).row_len <= s2o::WARP_ENTRIES) {                                             \
        const int row_number = s2o::WarpOfRow::row();                                   \
        if (row_number >= (p).rows) return;                                             \
        const s2o::Row row(p, row_number);                                              \
        if (row.seen <= 512) return run<s2o::WarpOfRow, 16>(p, row, row_number);        \
        if (row.seen <= 1024) return run<s2o::WarpOfRow, 32>(p, row, row_number);       \
        return run<s2o::WarpOfRow, 64>(p, row, row_number);                             \
    }                                                                                   \
    const int row_number = s2o::BlockOfRow::row();                                      \
    const s2o::Row row(p, row_number);                                                  \
    if (row.seen <= 4096) return run<s2o::BlockOfRow, 32>(p, row, row_number);          \
    return run<s2o::BlockOfRow, 64>(p, row, row_number)

// Of all entries of a row, -inf where hidden.
template <class Threads, int ENTRIES>
__device__ __forceinline__ float largest_of(const float (&x)[ENTRIES]) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) most = fmaxf(most, x[i]);
    return Threads::join(most, Larger());
}

constexpr float LOG2_E = 1.44269504088896340736f;

// e^(x - most), and x where that is -inf: hidden entries stay hidden.
__device__ __forceinline__ float exponential(float x, float most) {
    return x == -INFINITY ? x : exp2f((x - most) * LOG2_E);
}

}  // namespace s2o
