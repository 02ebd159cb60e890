// The softmax of the seen part of each row.
#include "launch.cuh"
#include "row_entries.cuh"

namespace s2o {

template <class Threads, int ENTRIES>
__device__ __forceinline__ void softmax(const RowParams& p, const ScoreRow& row, int row_number) {
    constexpr int VECTORS = ENTRIES / ROW_VECTOR;
    float x[ENTRIES];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const RowVector entries(row, (i * Threads::THREADS + Threads::thread()) * ROW_VECTOR, true);
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) {
            x[i * ROW_VECTOR + j] = entries.scored[j] ? entries.score[j] * p.scale : -INFINITY;
        }
    }
    const float max = fmaxf(max_of<Threads>(x), -FLT_MAX);
    float part[ROW_VECTOR] = {};
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        x[e] = fmaxf(exponential(x[e], max), 0.f);
        part[e % ROW_VECTOR] += x[e];
    }
    const float sum = sum_of<Threads>(part), scale = sum > 0.f ? 1.f / sum : 0.f;
    float* out = p.weights + int64_t(row_number) * p.row_len;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * Threads::THREADS + Threads::thread()) * ROW_VECTOR;
        float weights[ROW_VECTOR];
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) weights[j] = x[i * ROW_VECTOR + j] * scale;
        store_four<float4>(out, at, p.row_len, weights);
    }
    const float nothing[ROW_VECTOR] = {};
    for (int at = ENTRIES * Threads::THREADS + Threads::thread() * ROW_VECTOR; at < p.row_len;
         at += Threads::THREADS * ROW_VECTOR) {
        store_four<float4>(out, at, p.row_len, nothing);
    }
}

// Rows too long for the registers of a block are read three times.
__device__ __forceinline__ void long_softmax(const RowParams& p, const ScoreRow& row, int row_number) {
    auto over_row = [&](auto visit) {
        for (int at = threadIdx.x * ROW_VECTOR; at < row.seen; at += ROW_THREADS * ROW_VECTOR) {
            const RowVector entries(row, at, true);
            float x[ROW_VECTOR];
#pragma unroll
            for (int j = 0; j < ROW_VECTOR; ++j) x[j] = entries.scored[j] ? entries.score[j] * p.scale : -INFINITY;
            visit(at, x);
        }
    };
    float part[ROW_VECTOR] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    over_row([&](int, const float (&x)[ROW_VECTOR]) {
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) part[j] = fmaxf(part[j], x[j]);
    });
    const float max = fmaxf(max_of<BlockOfRow>(part), -FLT_MAX);
#pragma unroll
    for (int j = 0; j < ROW_VECTOR; ++j) part[j] = 0.f;
    over_row([&](int, const float (&x)[ROW_VECTOR]) {
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) part[j] += fmaxf(exponential(x[j], max), 0.f);
    });
    const float sum = sum_of<BlockOfRow>(part), scale = sum > 0.f ? 1.f / sum : 0.f;
    float* out = p.weights + int64_t(row_number) * p.row_len;
    over_row([&](int at, float (&x)[ROW_VECTOR]) {
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) x[j] = fmaxf(exponential(x[j], max), 0.f) * scale;
        store_four<float4>(out, at, p.row_len, x);
    });
    // Zeros for the vectors after the last seen entry.
    const float nothing[ROW_VECTOR] = {};
    const int first = (row.seen + ROW_VECTOR - 1) / ROW_VECTOR * ROW_VECTOR;
    for (int at = first + threadIdx.x * ROW_VECTOR; at < p.row_len; at += ROW_THREADS * ROW_VECTOR) {
        store_four<float4>(out, at, p.row_len, nothing);
    }
}

// One warp or block per row.
__device__ __forceinline__ void row_softmax(const RowParams& p) {
    if (p.row_len > BLOCK_ENTRIES) return long_softmax(p, ScoreRow(p, blockIdx.x), blockIdx.x);
    S2O_FOR_ENTRIES(softmax, p);
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_row_softmax_launch = {s2o::ROW_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::ROW_THREADS, 3) s2o_row_softmax(const __grid_constant__ s2o::RowParams p) {
    s2o::row_softmax(p);
}
}
