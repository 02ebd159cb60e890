// The likeliest token of a row of logits.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "launch.cuh"

namespace s2o {

constexpr int LIKELIEST_THREADS = 1024;
constexpr int LIKELIEST_LOADS = 16;  // of a thread: enough in flight at once

struct LikeliestParams {
    const float* logits;  // (size)
    uint32_t* out;        // where the largest is, of equal ones the first; then 1 if all are finite, otherwise 0
    int64_t size;
};
static_assert(sizeof(LikeliestParams) == 24 && offsetof(LikeliestParams, size) == 16, "mirrored on the host");

struct Logit {
    float value;
    uint32_t at;
};

__device__ __forceinline__ Logit larger(const Logit& x, const Logit& y) {
    return y.value > x.value || (y.value == x.value && y.at < x.at) ? y : x;
}

__device__ __forceinline__ Logit largest_of_warp(Logit x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x = larger(x, {__shfl_xor_sync(~0u, x.value, step), __shfl_xor_sync(~0u, x.at, step)});
    }
    return x;
}

// Grid 1. If no logit is above -infinity, the place is 0.
__device__ __forceinline__ void likeliest(const LikeliestParams& p) {
    constexpr int WARPS = LIKELIEST_THREADS / 32;
    __shared__ Logit of_warp[WARPS];
    Logit largest = {-INFINITY, 0};
    bool finite = true;
    for (int64_t first = threadIdx.x; first < p.size; first += LIKELIEST_THREADS * LIKELIEST_LOADS) {
#pragma unroll
        for (int i = 0; i < LIKELIEST_LOADS; ++i) {
            // After the last logit comes the last one again.
            const int64_t at = min(first + i * LIKELIEST_THREADS, p.size - 1);
            const float value = p.logits[at];
            if (value > largest.value) largest = {value, uint32_t(at)};
            finite = finite && isfinite(value);
        }
    }
    largest = largest_of_warp(largest);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
    const int all_finite = __syncthreads_and(finite);
    if (threadIdx.x < 32) {
        largest = largest_of_warp(of_warp[threadIdx.x]);
        static_assert(WARPS == 32, "one lane for each warp");
        if (threadIdx.x == 0) {
            p.out[0] = largest.at;
            p.out[1] = all_finite != 0;
        }
    }
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_likeliest_launch = {s2o::LIKELIEST_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::LIKELIEST_THREADS)
    s2o_likeliest(const __grid_constant__ s2o::LikeliestParams p) {
    s2o::likeliest(p);
}
}
