// What a decoder layer does beside its matrix products and attention, one kernel for each step between two of them:
//   s2o_rms_norm_*        x + delta, and its RMS norm; a block for each row
//   s2o_silu_mul_*        silu(gate) * up; a block for each row and part of it
//   s2o_rotate_*          q and k of every position normed (or not) and rotated, k and v put into the cache; a block
//                         for each position
//   s2o_rotation_table    cos and sin that s2o_rotate_* turns by; a thread for each
// All of them are bound by memory: 16-byte accesses, every byte once, sums in f32. Tensors are contiguous unless they
// have strides here, and begin at multiples of 16 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

struct NormParams {
    const void* x;       // (rows, width)
    const void* delta;   // as x; or null, and then there is no sum
    const void* weight;  // (width)
    void* sum;           // as x
    void* out;           // as x
    int32_t width;       // a multiple of 8
    float eps;
};
static_assert(sizeof(NormParams) == 48 && offsetof(NormParams, width) == 40, "mirrored on the host");

struct SiluParams {
    const void* gate_up;  // (rows, 2 * width): a row's gates and then its ups
    void* out;            // (rows, width)
    int64_t width;        // a multiple of 8
};
static_assert(sizeof(SiluParams) == 24 && offsetof(SiluParams, width) == 16, "mirrored on the host");

struct RotateParams {
    const void* qkv;     // (batch, len, num_heads + 2 * num_kv_heads, head_dim)
    const void* q_norm;  // (head_dim); or null: not normed
    const void* k_norm;  // as q_norm
    const float* table;  // (2, len, head_dim / 2): cos and sin of the positions
    void* q_out;         // (batch, len, num_heads, head_dim)
    void* k_out;         // (batch, len, num_kv_heads, head_dim), in the cache
    void* v_out;
    Strides k_strides;
    Strides v_strides;
    int32_t len;
    int32_t num_heads;
    int32_t num_kv_heads;
    float eps;
};
static_assert(sizeof(RotateParams) == 120 && offsetof(RotateParams, k_strides) == 56 &&
                  offsetof(RotateParams, len) == 104,
              "mirrored on the host");

struct RotationParams {
    const float* inverse_frequencies;  // (half)
    float* table;                      // (2, len, half): cos and sin
    double factor;                     // on both
    int64_t start;                     // position of the first row
    int32_t len;
    int32_t half;
};
static_assert(sizeof(RotationParams) == 40 && offsetof(RotationParams, len) == 32, "mirrored on the host");

}  // namespace s2o
