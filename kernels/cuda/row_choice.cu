// Top-p or top-k of rows of scores without a sort: the greatest entries until their sum or number reaches the wanted
// value. The threshold is a score, found by bisecting the bits of non-negative floats, which are ordered like integers.
// Equal entries are chosen together.
#include "launch.cuh"
#include "row_entries.cuh"

namespace s2o {

__device__ __forceinline__ float weight(const RowParams& p, float x) {
    return x == -INFINITY ? 0.f : p.counts ? 1.f : x;
}

// The largest score such that the entries not below it weigh at least `wanted` > 0. `high` is the bits of a score whose
// entries weigh less. Zeros can reach `wanted` only if entries are counted.
template <class Threads, bool COUNTS, int ENTRIES>
__device__ __forceinline__ float threshold_at(const float (&x)[ENTRIES], float wanted, uint32_t high) {
    uint32_t low = COUNTS ? 0 : 1;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const float candidate = __uint_as_float(middle);
        float part[ROW_VECTOR] = {};
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e) {
            if (x[e] >= candidate) part[e % ROW_VECTOR] += COUNTS ? 1.f : x[e];
        }
        if (sum_of<Threads>(part) >= wanted) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return __uint_as_float(low);
}

template <class Threads, int ENTRIES>
__device__ __forceinline__ void choose(const RowParams& p, const ScoreRow& row, int row_number) {
    constexpr int VECTORS = ENTRIES / ROW_VECTOR;
    auto column = [](int i) { return (i * Threads::THREADS + Threads::thread()) * ROW_VECTOR; };
    float x[ENTRIES], threshold = INFINITY;
    if (!row.select_all) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (i % ROW_IN_FLIGHT == 0) compiler_barrier();
            const RowVector entries(row, column(i), true);
#pragma unroll
            for (int j = 0; j < ROW_VECTOR; ++j) {
                const float score = p.softmax ? entries.score[j] * p.scale : entries.score[j];
                x[i * ROW_VECTOR + j] = entries.scored[j] ? score : -INFINITY;
            }
        }
        float max = fmaxf(max_of<Threads>(x), -FLT_MAX);
        if (p.softmax) {
#pragma unroll
            for (int e = 0; e < ENTRIES; ++e) x[e] = exponential(x[e], max);
            max = 1.f;
        }
        // Forced entries that count first are chosen already, so they are taken out.
        float before = 0.f;
        if (p.forced_count_first) {
            float part[ROW_VECTOR] = {};
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                compiler_barrier();
                const RowVector entries(row, column(i), false);
#pragma unroll
                for (int j = 0; j < ROW_VECTOR; ++j) {
                    const int e = i * ROW_VECTOR + j;
                    if (entries.forced[j]) {
                        part[j] += weight(p, x[e]);
                        x[e] = -INFINITY;
                    }
                }
            }
            before = sum_of<Threads>(part);
        }
        float part[ROW_VECTOR] = {};
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e) part[e % ROW_VECTOR] += weight(p, x[e]);
        const float others = sum_of<Threads>(part);
        // The weight that remains for entries that are not forced.
        const float wanted = p.counts ? p.counts[row_number] - before
                                      : others - (others + before) * p.left_out[entry_of(p.left_out_of, row_number)];
        const bool enabled = !p.enabled || p.enabled[entry_of(p.enabled_of, row_number)] != 0;
        const uint32_t high = __float_as_uint(fmaxf(max, 0.f)) + 1;
        if (enabled && wanted > 0.f) {
            threshold = p.counts ? threshold_at<Threads, true>(x, wanted, high)
                                 : threshold_at<Threads, false>(x, wanted, high);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = column(i);
        compiler_barrier();
        const RowVector entries(row, at, false);
        uint8_t chosen[ROW_VECTOR];
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) {
            const bool forced = entries.forced[j] || (entries.seen[j] && (row.select_all || !entries.scored[j]));
            chosen[j] = forced || (!row.select_all && x[i * ROW_VECTOR + j] >= threshold);
        }
        if (at < p.row_len) store_choice(p, row_number, at, chosen);
    }
    const uint8_t nothing[ROW_VECTOR] = {};
    for (int at = ENTRIES * Threads::THREADS + Threads::thread() * ROW_VECTOR; at < p.row_len;
         at += Threads::THREADS * ROW_VECTOR) {
        store_choice(p, row_number, at, nothing);
    }
}

// One warp or block per row.
__device__ __forceinline__ void row_choice(const RowParams& p) { S2O_FOR_ENTRIES(choose, p); }

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_row_choice_launch = {s2o::ROW_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::ROW_THREADS, 3) s2o_row_choice(const __grid_constant__ s2o::RowParams p) {
    s2o::row_choice(p);
}
}
