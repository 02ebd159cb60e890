// Online softmax over a 64-row accumulator fragment: the state (row_max, row_sum) of the two rows of a thread.
//
// Fragment layout (wgmma, m64): element i of a thread is row 8*((i>>1)&1) + lane/4 of its warp's 16 rows and column
// 8*(i>>2) + 2*(lane%4) + (i&1). row_sum stays per thread until `finish`; only row_max needs the quad for each tile.
#pragma once
#include <cmath>

#include "pair.cuh"

namespace s2o {

// A maximum may lag behind the scores by this power of two: exponentials up to 256 lose nothing in f32, bf16 or f16.
constexpr float MAX_LAG = 8.f;

constexpr float LOG2_E = 1.44269504088896340736f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 11 bits, as in FlashAttention.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

struct OnlineSoftmax {
    float row_max[2] = {-INFINITY, -INFINITY};
    float row_sum[2] = {0.f, 0.f};

    // Replaces scores by probabilities relative to the new maximum. `rescale` is the factor for earlier sums and
    // accumulators. `tile_sum` is this thread's share of the tile's mass, the gain for early stopping. `tile_max` has
    // the tile's own maxima with WANTS_TILE_MAX. Without EMPTY_ROWS every row must have a finite score in its first
    // tile, so that no maximum is -inf.
    template <bool EMPTY_ROWS, bool WANTS_TILE_MAX, int N>
    __device__ __forceinline__ void update(float (&s)[N], float scale_log2, float (&rescale)[2], float (&tile_sum)[2],
                                           float (&tile_max)[2]) {
        raise_max<EMPTY_ROWS, WANTS_TILE_MAX>(s, scale_log2, rescale, tile_max);
        exponentiate<EMPTY_ROWS>(s, scale_log2, rescale, tile_sum);
    }

    // The first half of `update`: the maxima.
    template <bool EMPTY_ROWS, bool WANTS_TILE_MAX, int N>
    __device__ __forceinline__ void raise_max(const float (&s)[N], float scale_log2, float (&rescale)[2],
                                              float (&tile_max)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = quad_max(highest_of_thread(s, h, WANTS_TILE_MAX ? s[2 * h] : row_max[h]));
            if constexpr (WANTS_TILE_MAX) {
                tile_max[h] = m;
                m = fmaxf(m, row_max[h]);
            }
            rescale[h] = raise_to<EMPTY_ROWS>(m, h, scale_log2);
        }
    }

    // The highest of `least` and the thread's scores of row h.
    template <int N>
    __device__ __forceinline__ float highest_of_thread(const float (&s)[N], int h, float least) const {
        // Two chains per row, because one chain would wait for its own latency.
        float m0 = least, m1 = s[2 * h + 1];
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            m0 = fmaxf(m0, s[i + 2 * h]);
            m1 = fmaxf(m1, s[i + 2 * h + 1]);
        }
        return fmaxf(m0, m1);
    }

    // Sets the maximum of row h, and returns the factor for what was summed before.
    template <bool EMPTY_ROWS>
    __device__ __forceinline__ float raise_to(float m, int h, float scale_log2) {
        const float rescale = EMPTY_ROWS && m == -INFINITY ? 1.f : exp2_approx((row_max[h] - m) * scale_log2);
        row_max[h] = m;
        return rescale;
    }

    // Instead of `raise_max`, with maxima that may lag: the thread's maxima in the tile, and whether a maximum must rise.
    template <int N>
    __device__ __forceinline__ bool must_rise(const float (&s)[N], float scale_log2, float (&tile_max)[2]) const {
        bool rises = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            tile_max[h] = highest_of_thread(s, h, s[2 * h]);
            rises = rises || exceeds(tile_max[h], h, scale_log2, MAX_LAG);
        }
        return rises;
    }

    // Whether `m` is above the maximum of row h by more than the power of two `lag`.
    __device__ __forceinline__ bool exceeds(float m, int h, float scale_log2, float lag) const {
        return (m - row_max[h]) * scale_log2 > lag;
    }

    // Raises the maxima that must rise to those of the quad's `tile_max`, and rescales the sums. The other rows of the warp
    // keep their bits.
    __device__ __forceinline__ void raise_lagging(const float (&tile_max)[2], float scale_log2, float (&rescale)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float m = quad_max(tile_max[h]);
            rescale[h] = raise_to<false>(exceeds(m, h, scale_log2, MAX_LAG) ? m : row_max[h], h, scale_log2);
            row_sum[h] *= rescale[h];
        }
    }

    // The second half: probabilities and sums.
    template <bool EMPTY_ROWS, int N>
    __device__ __forceinline__ void exponentiate(float (&s)[N], float scale_log2, const float (&rescale)[2],
                                                 float (&tile_sum)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float shift = EMPTY_ROWS && row_max[h] == -INFINITY ? 0.f : row_max[h] * scale_log2;
            float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                s[i + 2 * h] = exp2_approx(fmaf(s[i + 2 * h], scale_log2, -shift));
                s[i + 2 * h + 1] = exp2_approx(fmaf(s[i + 2 * h + 1], scale_log2, -shift));
                sum0 = i == 0 ? s[i + 2 * h] : sum0 + s[i + 2 * h];
                sum1 = i == 0 ? s[i + 2 * h + 1] : sum1 + s[i + 2 * h + 1];
            }
            tile_sum[h] = sum0 + sum1;
            row_sum[h] = fmaf(row_sum[h], rescale[h], tile_sum[h]);
        }
    }

    // Adds the scores of 16 keys to the sums, and packs their probabilities as an operand.
    template <typename T, bool EMPTY_ROWS>
    __device__ __forceinline__ void add(const float* s, float scale_log2, uint32_t* p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 low = weights<EMPTY_ROWS>(s, h, scale_log2), high = weights<EMPTY_ROWS>(s, h + 2, scale_log2);
            row_sum[h] += (low.x + low.y) + (high.x + high.y);
            p[h] = pack<T>(low.x, low.y);
            p[h + 2] = pack<T>(high.x, high.y);
        }
    }
    // The same for register `i` of the operand alone, which it returns.
    template <typename T, bool EMPTY_ROWS>
    __device__ __forceinline__ uint32_t add(const float* s, int i, float scale_log2) {
        const float2 w = weights<EMPTY_ROWS>(s, i, scale_log2);
        row_sum[i % 2] += w.x + w.y;
        return pack<T>(w.x, w.y);
    }
    template <bool EMPTY_ROWS>
    __device__ __forceinline__ float2 weights(const float* s, int i, float scale_log2) const {
        const int h = i % 2;
        const float shift = EMPTY_ROWS && row_max[h] == -INFINITY ? 0.f : row_max[h] * scale_log2;
        return make_float2(exp2_approx(fmaf(s[2 * i], scale_log2, -shift)),
                           exp2_approx(fmaf(s[2 * i + 1], scale_log2, -shift)));
    }

    __device__ __forceinline__ void finish() {
        row_sum[0] = quad_sum(row_sum[0]);
        row_sum[1] = quad_sum(row_sum[1]);
    }
};

// Raises the maxima of a warp's fragments to those of new scores, and calls `rescale(m, factors)` for what was summed
// before. With LAGS a maximum rises only if a score is MAX_LAG above it, which is rare. The quads exchange theirs only if
// one of the warp rises. Whether a maximum rises depends on the row's own scores alone, so the other rows of the warp do not
// change its bits.
template <bool EMPTY_ROWS, bool LAGS, int M, int N, class F>
__device__ __forceinline__ void raise_maxima(OnlineSoftmax (&softmax)[M], const float (&s)[M][N], float scale_log2,
                                             F rescale) {
    float highest[M][2];
    bool rises = false;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            highest[m][h] = softmax[m].highest_of_thread(s[m], h, softmax[m].row_max[h]);
            const bool must_rise = softmax[m].exceeds(highest[m][h], h, scale_log2, LAGS ? MAX_LAG : 0.f);
            if (!must_rise) highest[m][h] = softmax[m].row_max[h];
            rises = rises || must_rise;
        }
    }
    if (!__any_sync(0xffffffffu, rises)) return;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        float factors[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            factors[h] = softmax[m].template raise_to<EMPTY_ROWS>(quad_max(highest[m][h]), h, scale_log2);
            softmax[m].row_sum[h] *= factors[h];
        }
        rescale(m, factors);
    }
}

// 1 / mass, or 0 for a row without keys. A branch around an exact division would spill registers of the portable kernels.
__device__ __forceinline__ float inverse_mass(float mass) {
    return __fdividef(mass == 0.f ? 0.f : 1.f, mass == 0.f ? 1.f : mass);
}

// acc *= the row's factor.
template <int N>
__device__ __forceinline__ void rescale_rows(float (&acc)[N], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] *= factor[(i >> 1) & 1];
}

}  // namespace s2o
