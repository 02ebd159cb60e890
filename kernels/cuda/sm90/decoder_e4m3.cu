// Inputs of linear layers in e4m3, and their product with few rows. cuBLASLt multiplies many rows.
#include "../decoder_params.cuh"
#include "../decoder_row.cuh"
#include "../launch.cuh"
#include "e4m3.cuh"

namespace s2o {

template <typename T>
__device__ __forceinline__ void rms_norm_e4m3(const NormParams& p) {
    uint4 x[ROW_VECTORS];
    normed_row<T>(p, x);
    quantise<T>(x, p.width / VECTOR, p.out, p.scales);
}

template <typename T>
__device__ __forceinline__ void silu_mul_e4m3(const SiluParams& p) {
    const int count = int(p.width / VECTOR);
    const int64_t row = blockIdx.x;
    uint4 x[ROW_VECTORS], ups[ROW_VECTORS];
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < count) {
            x[i] = *vectors(p.gate_up, row * 2 * count + at);
            ups[i] = *vectors(p.gate_up, (row * 2 + 1) * count + at);
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        if (threadIdx.x + i * blockDim.x < count) x[i] = gated<T>(x[i], ups[i]);
    }
    quantise<T>(x, count, p.out, p.scales);
}

template <typename T>
__device__ __forceinline__ void quantise(const QuantiseParams& p) {
    const int count = p.width / VECTOR;
    uint4 x[ROW_VECTORS];
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at < count) x[i] = *vectors(p.x, int64_t(blockIdx.x) * count + at);
    }
    quantise<T>(x, count, p.out, p.scales);
}

// The product of a few rows with an e4m3 matrix, as in decoding: bound by the memory of the weights. The rows stay in 16
// bits. A warp computes two outputs of up to eight rows.
constexpr int FEW_THREADS = 256;
constexpr int FEW_ROWS = 8;               // of a block
constexpr int OUTPUTS = 2;                // of a warp
constexpr int WEIGHTS = 16;               // of a 16-byte access
constexpr int FEW_STEP = 32 * WEIGHTS;    // weights of a row that a warp takes at once
constexpr int FEW_UNROLLED = 4;           // enough loads in flight at once

// Eight weights of an access.
__device__ __forceinline__ void widen_e4m3(uint32_t low, uint32_t high, float (&wide)[VECTOR]) {
    const uint32_t words[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto pair = __nv_fp8x2_storage_t(words[i / 2] >> (i % 2 * 16));
        const float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
        wide[2 * i] = both.x;
        wide[2 * i + 1] = both.y;
    }
}

template <typename T, int ROWS>
__device__ __forceinline__ void few_rows(const FewRowsParams& p) {
    const int lane = threadIdx.x % 32;
    const int output = (blockIdx.x * (FEW_THREADS / 32) + threadIdx.x / 32) * OUTPUTS;
    const int first_row = blockIdx.y * ROWS, rows = min(ROWS, p.rows - first_row);
    float acc[OUTPUTS][ROWS] = {};
    const auto weights = static_cast<const uint8_t*>(p.weight) + int64_t(output) * p.width_in;
    const int vectors_in = p.width_in / VECTOR;
    auto load = [&](int at, uint4 (&packed)[OUTPUTS]) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            packed[o] = __ldg(reinterpret_cast<const uint4*>(weights + int64_t(o) * p.width_in + at));
        }
    };
    auto multiply = [&](int at, const uint4 (&packed)[OUTPUTS]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float w[OUTPUTS][VECTOR];
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                widen_e4m3(half ? packed[o].z : packed[o].x, half ? packed[o].w : packed[o].y, w[o]);
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (row >= rows) break;
                float x[VECTOR];
                widen<T>(*vectors(p.x, int64_t(first_row + row) * vectors_in + at / VECTOR + half), x);
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) {
#pragma unroll
                    for (int j = 0; j < VECTOR; ++j) acc[o][row] = fmaf(w[o][j], x[j], acc[o][row]);
                }
            }
        }
    };
    const int first = lane * WEIGHTS;
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
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            float sum = acc[o][row];
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) {
                static_cast<T*>(p.out)[int64_t(first_row + row) * p.width_out + output + o] =
                    T(sum * p.scales[output + o]);
            }
        }
    }
}

}  // namespace s2o

#define S2O_E4M3_KERNEL(name, threads, max_threads, params, ...)                                              \
    extern "C" {                                                                                               \
    __constant__ s2o::LaunchInfo name##_launch = {threads, 0, 0, 0, s2o::OVERLAPS};                            \
    __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ s2o::params p) {                \
        s2o::next_may_start();                                                                                 \
        __VA_ARGS__;                                                                                           \
    }                                                                                                          \
    }

#define S2O_E4M3_KERNELS(suffix, T)                                                                                   \
    S2O_E4M3_KERNEL(s2o_rms_norm_e4m3_##suffix, 0, s2o::ROW_THREADS, NormParams,                                       \
                    s2o::after_previous(); s2o::rms_norm_e4m3<T>(p))                                                   \
    S2O_E4M3_KERNEL(s2o_silu_mul_e4m3_##suffix, 0, s2o::ROW_THREADS, SiluParams,                                       \
                    s2o::after_previous(); s2o::silu_mul_e4m3<T>(p))                                                   \
    S2O_E4M3_KERNEL(s2o_quantise_##suffix, 0, s2o::ROW_THREADS, QuantiseParams,                                         \
                    s2o::after_previous(); s2o::quantise<T>(p))                                                        \
    S2O_E4M3_KERNEL(s2o_few_rows_e4m3_##suffix, s2o::FEW_THREADS, s2o::FEW_THREADS, FewRowsParams,                     \
                    if (p.rows == 1) s2o::few_rows<T, 1>(p); else s2o::few_rows<T, s2o::FEW_ROWS>(p))

S2O_E4M3_KERNELS(bf16, __nv_bfloat16)
S2O_E4M3_KERNELS(f16, __half)
