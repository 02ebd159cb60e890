// The steps of a decoder layer between its matrix products and attention, one kernel for each:
//   s2o_rms_norm_*        x + delta and its RMS norm; one block per row
//   s2o_silu_mul_*        silu(gate) * up; one block per part of a row
//   s2o_quantise_*        rows, rotated, as 8-bit integers with a scale each; one block per row
//   s2o_rms_norm_int8_*   s2o_rms_norm_* with its result quantised; one block per row
//   s2o_few_rows_int8_*   products of a few quantised rows with a quantised matrix
//   s2o_linear_int8_*, s2o_gated_linear_int8_*, s2o_gated_linear_*   products of many rows (sm90/linear.cuh)
//   s2o_rotate_*          norms (optionally) and rotates q and k, writes k and v to the cache; one block per position
//   s2o_rotation_table    cos and sin for s2o_rotate_*; one thread per pair
// All but the products of many rows are bound by memory: 16-byte accesses, every byte once, sums in f32. Tensors are contiguous
// unless they have strides here, and begin at multiples of 16 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params.cuh"

namespace s2o {

struct NormParams {
    const void* x;       // (rows, width)
    const void* delta;   // as x; or null: `sum` is then not written
    const void* weight;  // (width)
    void* sum;           // as x
    void* out;           // as x; int8 if quantised
    float* scales;       // (rows), if quantised
    int32_t width;       // a multiple of 8
    float eps;
};
static_assert(sizeof(NormParams) == 56 && offsetof(NormParams, width) == 48, "mirrored on the host");

struct SiluParams {
    const void* gate_up;  // (rows, 2 * width): a row's gates, then its ups
    void* out;            // (rows, width)
    int64_t width;        // a multiple of 8
};
static_assert(sizeof(SiluParams) == 24 && offsetof(SiluParams, width) == 16, "mirrored on the host");

struct QuantiseParams {
    const void* x;  // (rows, width)
    void* out;      // (rows, width), int8
    float* scales;  // (rows)
    int64_t width;  // a multiple of 16
};
static_assert(sizeof(QuantiseParams) == 32 && offsetof(QuantiseParams, width) == 24, "mirrored on the host");

// Grid of `few_rows_int8`: (weight_rows / 16, ceil(rows / 8)). The other products are persistent and take x, weight and out
// as tensor maps. With a gate the weight's rows are all gates, then all ups, and out is silu(gate) * up.
struct LinearParams {
    const void* x;               // (rows, width_in), int8; or 16 bits without scales, as the weight
    const void* weight;          // (weight_rows, width_in)
    const float* x_scales;       // (rows)
    const float* weight_scales;  // (weight_rows)
    void* out;                   // (rows, weight_rows), of 16 bits; with a gate (rows, weight_rows / 2)
    int32_t rows;
    int32_t width_in;     // a multiple of 16, or of 8 in 16 bits
    int32_t weight_rows;  // a multiple of 16, with a gate of 32, or of 16 in 16 bits
    int32_t is_gated;     // of `few_rows_int8`; the other products have kernels with and without a gate
    int32_t adds;         // whether products, rounded, are added to what `out` holds; not with a gate
};
static_assert(sizeof(LinearParams) == 64 && offsetof(LinearParams, rows) == 40, "mirrored on the host");

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
    double factor;                     // multiplies both
    int64_t start;                     // position of the first row
    int32_t len;
    int32_t half;
};
static_assert(sizeof(RotationParams) == 40 && offsetof(RotationParams, len) == 32, "mirrored on the host");

}  // namespace s2o
