// Rows of 16-bit elements as 8-bit integers with one scale for each row, after a rotation that spreads large entries.
#pragma once
#include "../decoder_row.cuh"

namespace s2o {

constexpr float INT8_MOST = 127.f;
// Entries below this count as zeros, because the factor of a row of them would be infinite.
constexpr float INT8_LEAST = 0x1p-100f;
// Most elements of a block of the rotation: eight lanes hold one.
constexpr int MOST_ROTATED = 64;

// The blocks of rows of `width`: the largest power of two that divides it, but at most MOST_ROTATED.
__device__ __forceinline__ int rotated_block(int width) { return min(width & -width, MOST_ROTATED); }

// Multiplies each block of a row with a Hadamard matrix, whose product with its transpose is the size of the block times
// the identity: up to this factor, the product of two rows that are both rotated is that of the rows. The order of the
// results, and their signs, are those that need the fewest exchanges between lanes, two for each element instead of three.
// Every lane takes part, with zeros beyond the row.
__device__ __forceinline__ void rotate(float (&x)[VECTOR], int block) {
#pragma unroll
    for (int step = 1; step < VECTOR; step *= 2) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            if ((j & step) == 0) {
                const float low = x[j], high = x[j + step];
                x[j] = low + high;
                x[j + step] = low - high;
            }
        }
    }
    for (int step = 1; step < block / VECTOR; step *= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int j = 0; j < VECTOR / 2; ++j) {
            // A lane keeps one half of its elements and gets the other lane's.
            const float own = upper ? x[j + VECTOR / 2] : x[j];
            const float got = __shfl_xor_sync(~0u, upper ? x[j] : x[j + VECTOR / 2], step);
            x[j] = own + got;
            x[j + VECTOR / 2] = own - got;
        }
    }
}

// The larger of two magnitudes, and NaN if one is.
struct MostOrNan {
    __device__ __forceinline__ float operator()(float x, float y) const {
        float z;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
        return z;
    }
};

// Four numbers times `factor`, then within [-127, 127], rounded to bytes: after the addition they are the low bits of the
// sum.
__device__ __forceinline__ uint32_t four_bytes(const float* x, float factor) {
    constexpr float SHIFT = 0x1.8p23f;
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(fmaf(x[i], factor, SHIFT));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// Rotates and quantises a row of `count` vectors in the registers of its block: rotated row = int8 * scale. A row of zeros
// has scale 0. With a NaN or an infinite entry the scale is not finite, and a product with the row NaN.
template <typename T>
__device__ __forceinline__ void quantise(const uint4 (&x)[ROW_VECTORS], int count, void* values, float* scales) {
    const int block = rotated_block(count * VECTOR);
    float wide[ROW_VECTORS][VECTOR];
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        if (i * blockDim.x >= count) break;
        widen<T>(threadIdx.x + i * blockDim.x < count ? x[i] : make_uint4(0, 0, 0, 0), wide[i]);
        rotate(wide[i], block);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) most = MostOrNan()(most, fabsf(wide[i][j]));
    }
    most = over_block(most, MostOrNan());
    const bool is_zero = most < INT8_LEAST;
    const float factor = is_zero ? 0.f : INT8_MOST / most;
    if (threadIdx.x == 0) scales[blockIdx.x] = is_zero ? 0.f : most / (INT8_MOST * sqrtf(float(block)));
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < count) {
            static_cast<uint2*>(values)[int64_t(blockIdx.x) * count + at] =
                make_uint2(four_bytes(wide[i], factor), four_bytes(wide[i] + 4, factor));
        }
    }
}

}  // namespace s2o
