// Keys and values in 8 bits: a row of a head has one scale, and an entry is (code - 128) * scale. Codes are 1 to 255. A
// row of zeros has scale 0; a row with an entry that is not finite has a scale that is not, so that it stays not finite.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

constexpr float INT8_MOST = 127.f;     // the largest entry of a row divided by its scale
constexpr float INT8_LEAST = 1e-30f;   // rows below it are zeros, because their factor would be infinite
constexpr float INT8_HALF_UP = 128.5f; // the code of zero, and one half to round

// Rows of one layer's keys or values, in 16 bits and in 8, from the first position of the launch on.
struct Int8Params {
    void* rows;      // (batch, len, num_heads, head_dim)
    uint8_t* codes;  // as rows
    float* scales;   // (batch, len, num_heads)
    Strides row_strides;
    Strides code_strides;
    Strides scale_strides;
    int32_t len;
    int32_t num_heads;
};
static_assert(sizeof(Int8Params) == 104 && offsetof(Int8Params, row_strides) == 24 && offsetof(Int8Params, len) == 96,
              "mirrored on the host");

// Attention of one query on keys and values in 8 bits; `split.attn` has the addresses and strides of the codes.
struct Int8SplitParams {
    SplitParams split;
    const float* scales[2];  // of keys and values: (batch, num_kv_heads, positions)
    int64_t scale_batch_stride;
    int64_t scale_head_stride;
};
static_assert(sizeof(Int8SplitParams) == 264 && offsetof(Int8SplitParams, scales) == 232, "mirrored on the host");

// The entries of four codes, divided by their scale.
__device__ __forceinline__ void int8_entries(uint32_t codes, float (&entries)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // A code as the last bits of 2^23 is 2^23 + code in f32; a conversion of integers would be slower.
        entries[i] = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7440 + i)) - (8388608.f + 128.f);
    }
}

}  // namespace s2o
