// Rows of 16-bit elements as e4m3 (8 bits: sign, 4 of exponent, 3 of mantissa) with one scale for each row.
#pragma once
#include <cuda_fp8.h>

#include "../decoder_row.cuh"

namespace s2o {

constexpr float E4M3_MOST = 448.f;

// Eight numbers as e4m3, rounded to nearest even; larger ones than 448 become 448, NaN stays NaN.
__device__ __forceinline__ uint2 to_e4m3(const float (&x)[VECTOR]) {
    uint32_t halves[VECTOR / 2];
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) {
        halves[i] = __nv_cvt_float2_to_fp8x2(make_float2(x[2 * i], x[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
    }
    return make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
}

// Entries below this count as zeros, because the factor of a row of them would be infinite.
constexpr float E4M3_LEAST = 0x1p-100f;

// Quantises a row of `count` vectors in the registers of its block: x = e4m3 * scale. A row of zeros has scale 0. A NaN
// stays NaN. With an infinite entry the scale is infinite, and a product with the row NaN.
template <typename T>
__device__ __forceinline__ void quantise(const uint4 (&x)[ROW_VECTORS], int count, void* values, float* scales) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        if (threadIdx.x + i * blockDim.x < count) {
            float wide[VECTOR];
            widen<T>(x[i], wide);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) most = fmaxf(most, fabsf(wide[j]));
        }
    }
    most = over_block(most, Max());
    const bool is_zero = most < E4M3_LEAST;
    const float factor = is_zero ? 0.f : E4M3_MOST / most;
    if (threadIdx.x == 0) scales[blockIdx.x] = is_zero ? 0.f : most / E4M3_MOST;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < count) {
            float wide[VECTOR];
            widen<T>(x[i], wide);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) wide[j] *= factor;
            static_cast<uint2*>(values)[int64_t(blockIdx.x) * count + at] = to_e4m3(wide);
        }
    }
}

}  // namespace s2o
