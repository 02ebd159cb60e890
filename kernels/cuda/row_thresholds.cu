// The cut between what is chosen of a row and what is not, for every architecture from sm_80 on: top-k and top-p of rows that
// are too long or too many to sort.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"

namespace s2o {

struct RowThresholdParams {
    const float* scores;  // (rows, row_len), non-negative
    const float* wanted;  // (rows)
    float* thresholds;    // (rows)
    int64_t row_len;
    int32_t counts;       // 1: a chosen entry counts 1, 0: its value
};
static_assert(sizeof(RowThresholdParams) == 40 && offsetof(RowThresholdParams, row_len) == 24, "mirrored on the host");

constexpr int THRESHOLD_THREADS = 1024;  // at most
constexpr int THRESHOLD_CACHED = 16;     // entries that a thread keeps; longer rows are read again in each step
// Halvings of (0, twice the largest]: f32 has 24 bits of fraction, and the threshold may be 2^-16 of the largest.
constexpr int THRESHOLD_STEPS = 40;

// The same for every thread: a fixed order of the same numbers.
template <class Op>
__device__ __forceinline__ float over_block(float x, Op op) {
    __shared__ float of_warp[THRESHOLD_THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// A block for each row.
__device__ __forceinline__ void row_threshold(const RowThresholdParams& p) {
    const float* row = p.scores + int64_t(blockIdx.x) * p.row_len;
    const bool cached = p.row_len <= int64_t(blockDim.x) * THRESHOLD_CACHED;
    float entries[THRESHOLD_CACHED];
#pragma unroll
    for (int i = 0; i < THRESHOLD_CACHED; ++i) {
        const int64_t at = threadIdx.x + int64_t(i) * blockDim.x;
        // Below every threshold.
        entries[i] = cached && at < p.row_len ? row[at] : -1.f;
    }
    auto fold = [&](float x, auto op) {
        if (cached) {
#pragma unroll
            for (int i = 0; i < THRESHOLD_CACHED; ++i) x = op(x, entries[i]);
        } else {
            for (int64_t at = threadIdx.x; at < p.row_len; at += blockDim.x) x = op(x, row[at]);
        }
        return x;
    };
    auto larger = [](float a, float b) { return fmaxf(a, b); };
    auto sum = [](float a, float b) { return a + b; };
    const float wanted = p.wanted[blockIdx.x];
    float low = 0.f, high = 2.f * over_block(fold(0.f, larger), larger);
    for (int step = 0; step < THRESHOLD_STEPS; ++step) {
        const float middle = 0.5f * (low + high);
        const float chosen = fold(0.f, [&](float x, float entry) {
            return entry >= middle ? x + (p.counts ? 1.f : entry) : x;
        });
        const bool reached = over_block(chosen, sum) >= wanted;
        low = reached ? middle : low;
        high = reached ? high : middle;
    }
    if (threadIdx.x == 0) p.thresholds[blockIdx.x] = low;
}

}  // namespace s2o

// A launch takes 256 threads for rows that these can keep, else all.
extern "C" {
__constant__ s2o::LaunchInfo s2o_row_thresholds_launch = {s2o::THRESHOLD_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::THRESHOLD_THREADS)
    s2o_row_thresholds(const __grid_constant__ s2o::RowThresholdParams p) {
    s2o::row_threshold(p);
}
}
