// Rows of scores in the registers of a warp or a block.
#pragma once
#include <cfloat>

#include "online_softmax.cuh"
#include "selection_params.cuh"

namespace s2o {

constexpr int ROW_THREADS = 128;    // of a block
constexpr int ROW_VECTOR = 4;       // consecutive entries of a thread
constexpr int WARP_ENTRIES = 2048;  // longest row that a warp keeps; a block keeps longer rows
constexpr int BLOCK_ENTRIES = 8192;

// The threads of a row: a warp or a block. `join` combines in a fixed order and gives every thread the result.
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

// Sums four accumulators, which are separate so that additions need not wait for each other.
template <class Threads>
__device__ __forceinline__ float sum_of(const float (&part)[ROW_VECTOR]) {
    return Threads::join((part[0] + part[1]) + (part[2] + part[3]), Plus());
}

__device__ __forceinline__ int64_t entry_of(const RowIndex& index, int row) { return row / index.each % index.count; }

// One row of the parameters.
struct ScoreRow {
    const float* scores;
    const uint8_t* scored;
    const uint8_t* forced;
    int len;
    int seen;
    int sink, from, to;
    bool aligned;  // entries are read four at a time
    bool select_all;

    __device__ __forceinline__ ScoreRow(const RowParams& p, int row) {
        len = p.row_len;
        scores = p.scores + int64_t(row) * len;
        scored = p.scored ? p.scored + entry_of(p.scored_of, row) * len : nullptr;
        forced = p.forced ? p.forced + entry_of(p.forced_of, row) * len : nullptr;
        RowBounds bounds = {0, 0, 0, 0};
        if (p.bounds) bounds = p.bounds[entry_of(p.bounds_of, row)];
        seen = p.bounds ? min(uint32_t(len), bounds.seen) : len;
        sink = min(uint32_t(len), bounds.sink);
        from = min(uint32_t(len), bounds.from);
        to = min(uint32_t(len), bounds.to);
        aligned = len % ROW_VECTOR == 0;
        const bool enabled = !p.enabled || p.enabled[entry_of(p.enabled_of, row)] != 0;
        select_all = (p.select_all && p.select_all[entry_of(p.select_all_of, row)] != 0) ||
                     (enabled && p.left_out && !(p.left_out[entry_of(p.left_out_of, row)] > 0.f));
    }
};

// Keeps the compiler from moving all loads of a row to the beginning, which would need too many registers.
__device__ __forceinline__ void compiler_barrier() { asm volatile("" ::: "memory"); }

constexpr int ROW_IN_FLIGHT = 4;  // vectors that a thread loads at once

// Entries at .. at + 4 of a row.
struct RowVector {
    float score[ROW_VECTOR];
    bool seen[ROW_VECTOR];
    bool scored[ROW_VECTOR];  // and seen
    bool forced[ROW_VECTOR];  // by `forced` or the bounds, and seen

    __device__ __forceinline__ RowVector(const ScoreRow& row, int at, bool with_scores) {
        const bool vectorised = row.aligned && at < row.seen;
        float4 scores = make_float4(0.f, 0.f, 0.f, 0.f);
        uchar4 scored4 = make_uchar4(1, 1, 1, 1), forced4 = make_uchar4(0, 0, 0, 0);
        if (vectorised && with_scores) scores = *reinterpret_cast<const float4*>(row.scores + at);
        if (vectorised && row.scored) scored4 = *reinterpret_cast<const uchar4*>(row.scored + at);
        if (vectorised && row.forced) forced4 = *reinterpret_cast<const uchar4*>(row.forced + at);
        const float each_score[ROW_VECTOR] = {scores.x, scores.y, scores.z, scores.w};
        const uint8_t each_scored[ROW_VECTOR] = {scored4.x, scored4.y, scored4.z, scored4.w};
        const uint8_t each_forced[ROW_VECTOR] = {forced4.x, forced4.y, forced4.z, forced4.w};
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) {
            const int column = at + j;
            seen[j] = column < row.seen;
            score[j] = each_score[j];
            uint8_t is_scored = each_scored[j], is_forced = each_forced[j];
            if (!row.aligned && seen[j]) {
                if (with_scores) score[j] = row.scores[column];
                if (row.scored) is_scored = row.scored[column];
                if (row.forced) is_forced = row.forced[column];
            }
            scored[j] = seen[j] && is_scored != 0;
            forced[j] = seen[j] && (is_forced != 0 || column < row.sink || (column >= row.from && column < row.to));
        }
    }
};

// Stores four consecutive values from column `at` of a row of `len`.
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

// Stores the choice for columns at .. at + 4; the mask may have half as many columns.
__device__ __forceinline__ void store_choice(const RowParams& p, int64_t row, int at,
                                             const uint8_t (&chosen)[ROW_VECTOR]) {
    if (p.merged_columns == 1) {
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

// Calls `run` with the threads of a row and the number of entries that each keeps. Uniform over those threads.
#define S2O_FOR_ENTRIES(run, p)                                                         \
    if ((p).row_len <= s2o::WARP_ENTRIES) {                                             \
        const int row_number = s2o::WarpOfRow::row();                                   \
        if (row_number >= (p).rows) return;                                             \
        const s2o::ScoreRow row(p, row_number);                                         \
        if (row.seen <= 512) return run<s2o::WarpOfRow, 16>(p, row, row_number);        \
        if (row.seen <= 1024) return run<s2o::WarpOfRow, 32>(p, row, row_number);       \
        return run<s2o::WarpOfRow, 64>(p, row, row_number);                             \
    }                                                                                   \
    const int row_number = s2o::BlockOfRow::row();                                      \
    const s2o::ScoreRow row(p, row_number);                                             \
    if (row.seen <= 4096) return run<s2o::BlockOfRow, 32>(p, row, row_number);          \
    return run<s2o::BlockOfRow, 64>(p, row, row_number)

// The maximum of a row, whose hidden entries are -inf.
template <class Threads, int ENTRIES>
__device__ __forceinline__ float max_of(const float (&x)[ENTRIES]) {
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) max = fmaxf(max, x[i]);
    return Threads::join(max, Larger());
}

// e^(x - max); -inf stays -inf, so that hidden entries stay hidden.
__device__ __forceinline__ float exponential(float x, float max) {
    return x == -INFINITY ? x : exp2f((x - max) * LOG2_E);
}

}  // namespace s2o
