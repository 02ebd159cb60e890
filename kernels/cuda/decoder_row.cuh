// Rows of 16-bit elements in the registers of a thread block: 16-byte accesses, f32 arithmetic.
#pragma once
#include "decoder_params.cuh"
#include "pair.cuh"

namespace s2o {

// Elements of a 16-byte access.
constexpr int VECTOR = 8;

template <typename T>
__device__ __forceinline__ void widen(const uint4& packed, float (&wide)[VECTOR]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(words[i]);
        wide[2 * i] = pair.x;
        wide[2 * i + 1] = pair.y;
    }
}

template <typename T>
__device__ __forceinline__ uint4 narrow(const float (&wide)[VECTOR]) {
    return make_uint4(pack<T>(wide[0], wide[1]), pack<T>(wide[2], wide[3]), pack<T>(wide[4], wide[5]),
                      pack<T>(wide[6], wide[7]));
}

__device__ __forceinline__ const uint4* vectors(const void* base, int64_t first) {
    return static_cast<const uint4*>(base) + first;
}

__device__ __forceinline__ uint4* vectors(void* base, int64_t first) { return static_cast<uint4*>(base) + first; }

constexpr int ROW_THREADS = 1024;  // at most; the launch gives each warp 1024 elements
constexpr int ROW_VECTORS = 4;     // of a thread

// The place in the row of vector i of this thread. A warp holds 1024 elements as two operands of mma, whose rows are 64
// elements (sm90/rotated_int8.cuh multiplies them): lane l has vectors l % 4 and l % 4 + 4 of rows l / 4 and l / 4 + 8.
__device__ __forceinline__ int vector_place(int i) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return warp * (32 * ROW_VECTORS) + i / 2 * 64 + lane / 4 * 8 + i % 2 * 4 + lane % 4;
}

struct Sum {
    __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};

// The sum or the maximum, in every thread, of values that are not negative. At most one call for each `Join` in a
// kernel: a second would overwrite `of_warp` while it is read.
template <typename Join>
__device__ __forceinline__ float over_block(float x, Join join) {
    __shared__ float of_warp[ROW_THREADS / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// The RMS norm of this block's row of x + delta, in registers. With a delta the sum is written to p.sum.
template <typename T>
__device__ __forceinline__ void normed_row(const NormParams& p, uint4 (&x)[ROW_VECTORS]) {
    const int count = p.width / VECTOR;
    const int64_t row = int64_t(blockIdx.x) * count;
    uint4 weights[ROW_VECTORS], delta[ROW_VECTORS];
    // All loads come first, so that a row waits for memory once.
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = vector_place(i);
        if (at < count) {
            weights[i] = *vectors(p.weight, at);
            x[i] = *vectors(p.x, row + at);
            if (p.delta) delta[i] = *vectors(p.delta, row + at);
        }
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = vector_place(i);
        if (at < count) {
            float wide[VECTOR];
            widen<T>(x[i], wide);
            if (p.delta) {
                float more[VECTOR];
                widen<T>(delta[i], more);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) wide[j] += more[j];
                x[i] = narrow<T>(wide);
                *vectors(p.sum, row + at) = x[i];
                // The norm uses the rounded residual stream, which the next layer reads.
                widen<T>(x[i], wide);
            }
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) squares += wide[j] * wide[j];
        }
    }
    const float scale = rsqrtf(over_block(squares, Sum()) / float(p.width) + p.eps);
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = vector_place(i);
        if (at < count) {
            float wide[VECTOR], weight[VECTOR];
            widen<T>(x[i], wide);
            widen<T>(weights[i], weight);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) wide[j] *= scale * weight[j];
            x[i] = narrow<T>(wide);
        }
    }
}

// x / (1 + exp(-x)). Without denormal numbers, whose handling takes more instructions than the rest.
__device__ __forceinline__ float silu(float x) {
    constexpr float MINUS_LOG2_E = -1.4426950408889634f;
    float exponential, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(x * MINUS_LOG2_E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exponential));
    return x * reciprocal;
}

// silu(gate) * up.
template <typename T>
__device__ __forceinline__ uint4 gated(const uint4& gates, const uint4& ups) {
    float gate[VECTOR], up[VECTOR];
    widen<T>(gates, gate);
    widen<T>(ups, up);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) gate[j] = silu(gate[j]) * up[j];
    return narrow<T>(gate);
}

}  // namespace s2o
