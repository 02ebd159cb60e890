// Inputs of linear layers in 8-bit integers, and the products of a few of them. linear_int8.cu multiplies many rows.
#include "../decoder_params.cuh"
#include "../decoder_row.cuh"
#include "../launch.cuh"
#include "rotated_int8.cuh"

namespace s2o {

template <typename T>
__device__ __forceinline__ void rms_norm_int8(const NormParams& p) {
    uint4 x[ROW_VECTORS];
    normed_row<T>(p, x);
    quantise<T>(x, p.width, p.out, p.scales);
}

template <typename T>
__device__ __forceinline__ void quantise(const QuantiseParams& p) {
    const int count = p.width / VECTOR;
    uint4 x[ROW_VECTORS];
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = vector_place(i);
        if (at < count) x[i] = *vectors(p.x, int64_t(blockIdx.x) * count + at);
    }
    quantise<T>(x, p.width, p.out, p.scales);
}

// The product of a few rows with a matrix, as in decoding: bound by the memory of the weights. A warp multiplies up to eight
// rows with two of the weight, a gate and its up if the product is gated.
constexpr int FEW_THREADS = 256;
constexpr int FEW_ROWS = 8;               // of a block
constexpr int OUTPUTS = 2;                // rows of the weight of a warp
constexpr int BYTES = 16;                 // of an access
constexpr int FEW_STEP = 32 * BYTES;      // weights of a row that a warp takes at once
constexpr int FEW_UNROLLED = 4;           // enough loads in flight at once

__device__ __forceinline__ int dot_16(const uint4& x, const uint4& y, int sum) {
    sum = __dp4a(int(x.x), int(y.x), sum);
    sum = __dp4a(int(x.y), int(y.y), sum);
    sum = __dp4a(int(x.z), int(y.z), sum);
    return __dp4a(int(x.w), int(y.w), sum);
}

template <typename T, int ROWS>
__device__ __forceinline__ void few_rows(const LinearParams& p) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, warps = FEW_THREADS / 32;
    const int64_t apart = p.is_gated ? p.weight_rows / 2 : 1;  // rows of the weight from the first to the second
    const int output = (blockIdx.x * warps + warp) * (p.is_gated ? 1 : OUTPUTS);
    const int first_row = blockIdx.y * ROWS, rows = min(ROWS, p.rows - first_row);
    int acc[OUTPUTS][ROWS] = {};
    const auto weights = static_cast<const uint8_t*>(p.weight) + int64_t(output) * p.width_in;
    const auto inputs = static_cast<const uint8_t*>(p.x) + int64_t(first_row) * p.width_in;
    auto load = [&](int at, uint4 (&packed)[OUTPUTS]) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            packed[o] = __ldg(reinterpret_cast<const uint4*>(weights + o * apart * p.width_in + at));
        }
    };
    auto multiply = [&](int at, const uint4 (&packed)[OUTPUTS]) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (row >= rows) break;
            const uint4 x = *reinterpret_cast<const uint4*>(inputs + int64_t(row) * p.width_in + at);
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) acc[o][row] = dot_16(packed[o], x, acc[o][row]);
        }
    };
    const int first = lane * BYTES;
    // The weights do not depend on the kernel before, the rows do.
    uint4 early[FEW_UNROLLED][OUTPUTS];
#pragma unroll
    for (int i = 0; i < FEW_UNROLLED; ++i) {
        if (first + i * FEW_STEP < p.width_in) load(first + i * FEW_STEP, early[i]);
    }
    after_previous();
#pragma unroll
    for (int i = 0; i < FEW_UNROLLED; ++i) {
        if (first + i * FEW_STEP < p.width_in) multiply(first + i * FEW_STEP, early[i]);
    }
#pragma unroll FEW_UNROLLED
    for (int at = first + FEW_UNROLLED * FEW_STEP; at < p.width_in; at += FEW_STEP) {
        uint4 packed[OUTPUTS];
        load(at, packed);
        multiply(at, packed);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        if (row >= rows) break;
        const float row_scale = p.x_scales[first_row + row];
        float product[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const int sum = __reduce_add_sync(~0u, acc[o][row]);
            product[o] = float(sum) * (row_scale * p.weight_scales[output + o * apart]);
        }
        if (lane == 0) {
            T* out = static_cast<T*>(p.out);
            if (p.is_gated) {
                out[int64_t(first_row + row) * (p.weight_rows / 2) + output] = T(silu(product[0]) * product[1]);
            } else {
                out += int64_t(first_row + row) * p.weight_rows + output;
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) {
                    const T rounded = T(product[o]);
                    out[o] = p.adds ? T(float(out[o]) + float(rounded)) : rounded;
                }
            }
        }
    }
}

}  // namespace s2o

#define S2O_INT8_KERNEL(name, threads, max_threads, params, ...)                                              \
    extern "C" {                                                                                               \
    __constant__ s2o::LaunchInfo name##_launch = {threads, 0, 0, 0, s2o::OVERLAPS};                            \
    __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ s2o::params p) {                \
        s2o::next_may_start();                                                                                 \
        __VA_ARGS__;                                                                                           \
    }                                                                                                          \
    }

#define S2O_INT8_KERNELS(suffix, T)                                                                                   \
    S2O_INT8_KERNEL(s2o_rms_norm_int8_##suffix, 0, s2o::ROW_THREADS, NormParams,                                       \
                    s2o::after_previous(); s2o::rms_norm_int8<T>(p))                                                   \
    S2O_INT8_KERNEL(s2o_quantise_##suffix, 0, s2o::ROW_THREADS, QuantiseParams,                                         \
                    s2o::after_previous(); s2o::quantise<T>(p))                                                        \
    S2O_INT8_KERNEL(s2o_few_rows_int8_##suffix, s2o::FEW_THREADS, s2o::FEW_THREADS, LinearParams,                     \
                    if (p.rows == 1) s2o::few_rows<T, 1>(p); else s2o::few_rows<T, s2o::FEW_ROWS>(p))

S2O_INT8_KERNELS(bf16, __nv_bfloat16)
S2O_INT8_KERNELS(f16, __half)
