// Rows of 16-bit elements as 8-bit integers with one scale for each row, after a rotation that spreads large entries.
#pragma once
#include "../decoder_row.cuh"
#include "../mma.cuh"

namespace s2o {

constexpr float INT8_MOST = 127.f;
// Entries below this count as zeros, because the factor of a row of them would be infinite.
constexpr float INT8_LEAST = 0x1p-100f;
// Most elements of a block of the rotation.
constexpr int MOST_ROTATED = 64;

// The blocks of rows of `width`, a multiple of 16: the largest power of two that divides it, but at most MOST_ROTATED.
__device__ __forceinline__ int rotated_block(int width) { return min(width & -width, MOST_ROTATED); }

// Multiplies each block of a row with a Hadamard matrix: entry (i, j) is -1 if i & j has an odd number of bits, else 1. Its
// product with its transpose is the size of the block times the identity, so up to this factor the product of two rows that
// are both rotated is that of the rows. `x` are the vectors at `vector_place`, zeros beyond the row.
//
// The index of an element in its 64 has the bits (v2 v1 v0 e2 e1 e0) of vector and element. A lane has v2 and e; (v1 v0) are
// those of the lane. mma multiplies by the bits v1, v0, e1 and e0, with sums in f32; sums within the lane do e2 and v2.
template <typename T>
__device__ __forceinline__ void rotate(const uint4 (&x)[ROW_VECTORS], int block, float (&out)[ROW_VECTORS][VECTOR]) {
    constexpr uint32_t ONE = std::is_same_v<T, __nv_bfloat16> ? 0x3f80 : 0x3c00, MINUS_ONE = ONE | 0x8000;
    const int lane = threadIdx.x % 32;
    // Operand b by halves of the columns and of the rows. Rows k are (e1 v1 v0 e0), columns n likewise.
    uint32_t signs[2][2];
#pragma unroll
    for (int column_half = 0; column_half < 2; ++column_half) {
#pragma unroll
        for (int row_half = 0; row_half < 2; ++row_half) {
            const int n = 8 * column_half + lane / 4, k = 8 * row_half + 2 * (lane % 4);
            // Blocks of 16 elements have two vectors, so v1 numbers blocks.
            const int bits = block > 16 ? n : n & ~4;
            const bool same_block = block > 16 || ((n ^ k) & 4) == 0;
            const uint32_t even = __popc(bits & k) & 1 ? MINUS_ONE : ONE, odd = __popc(bits & (k + 1)) & 1 ? MINUS_ONE : ONE;
            signs[column_half][row_half] = same_block ? even | odd << 16 : 0;
        }
    }
    auto word = [&](int vector, int i) {
        return i == 0 ? x[vector].x : i == 1 ? x[vector].y : i == 2 ? x[vector].z : x[vector].w;
    };
#pragma unroll
    for (int column_half = 0; column_half < 2; ++column_half) {  // e1 of the results
        float sums[2][2][4];                                    // by v2 and e2: of two rows the results with both e0
#pragma unroll
        for (int v2 = 0; v2 < 2; ++v2) {
#pragma unroll
            for (int e2 = 0; e2 < 2; ++e2) {
                float(&d)[4] = sums[v2][e2];
                d[0] = d[1] = d[2] = d[3] = 0.f;
                const uint32_t a[4] = {word(v2, 2 * e2), word(2 + v2, 2 * e2), word(v2, 2 * e2 + 1), word(2 + v2, 2 * e2 + 1)};
                mma<T>(d, a, signs[column_half][0], signs[column_half][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // (row, e0)
            const int at = 2 * column_half + i % 2;
            float low[2], high[2];  // by v2
#pragma unroll
            for (int v2 = 0; v2 < 2; ++v2) {
                low[v2] = sums[v2][0][i] + sums[v2][1][i];
                high[v2] = sums[v2][0][i] - sums[v2][1][i];
            }
            float(&first)[VECTOR] = out[i / 2 * 2], (&second)[VECTOR] = out[i / 2 * 2 + 1];
            const bool whole = block == MOST_ROTATED;
            first[at] = whole ? low[0] + low[1] : low[0];
            first[at + 4] = whole ? high[0] + high[1] : high[0];
            second[at] = whole ? low[0] - low[1] : low[1];
            second[at + 4] = whole ? high[0] - high[1] : high[1];
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

// Rotates and quantises a row in the registers of its block: rotated row = int8 * scale. A row of zeros has scale 0. With a
// NaN or an infinite entry the scale is not finite, and a product with the row NaN.
template <typename T>
__device__ __forceinline__ void quantise(uint4 (&x)[ROW_VECTORS], int width, void* values, float* scales) {
    const int block = rotated_block(width), count = width / VECTOR;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        if (vector_place(i) >= count) x[i] = make_uint4(0, 0, 0, 0);
    }
    float rotated[ROW_VECTORS][VECTOR];
    rotate<T>(x, block, rotated);
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) most = MostOrNan()(most, fabsf(rotated[i][j]));
    }
    most = over_block(most, MostOrNan());
    const bool is_zero = most < INT8_LEAST;
    const float factor = is_zero ? 0.f : INT8_MOST / most;
    if (threadIdx.x == 0) scales[blockIdx.x] = is_zero ? 0.f : most / (INT8_MOST * sqrtf(float(block)));
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = vector_place(i);
        if (at < count) {
            static_cast<uint2*>(values)[int64_t(blockIdx.x) * count + at] =
                make_uint2(four_bytes(rotated[i], factor), four_bytes(rotated[i] + 4, factor));
        }
    }
}

}  // namespace s2o
