// Rows of keys or values to 8 bits and back (int8.cuh):
//   s2o_store_int8_*  stores rows, and rounds them in place to the entries that were stored
//   s2o_load_int8_*   writes the entries of stored rows
// Both are bound by memory: every byte once. Grid: x: parts of the rows of a sequence, y: sequence.
#include "decoder_row.cuh"
#include "int8.cuh"
#include "launch.cuh"

namespace s2o {

constexpr int INT8_THREADS = 256;  // the launch follows int8_blocks in src/decoder.rs
constexpr int INT8_ROWS = 4;       // of a lane: enough loads in flight at once

// The vectors of a lane: LANES lanes hold a row.
template <typename T, int D>
struct Int8Lane {
    static constexpr int LANES = D / VECTOR;
    static constexpr int ROWS = INT8_THREADS / LANES;  // of a block at once
    static_assert(LANES < 32 && 32 % LANES == 0, "a row's lanes are of one warp");

    const Int8Params& p;
    const int lane, first;

    __device__ __forceinline__ explicit Int8Lane(const Int8Params& params)
        : p(params), lane(threadIdx.x % LANES), first(blockIdx.x * (ROWS * INT8_ROWS) + threadIdx.x / LANES) {}

    __device__ __forceinline__ bool has(int i) const { return first + i * ROWS < p.len * p.num_heads; }

    __device__ __forceinline__ int64_t offset(int i, const Strides& strides) const {
        const int row = first + i * ROWS, position = row / p.num_heads, head = row - position * p.num_heads;
        return int64_t(blockIdx.y) * strides.batch + position * strides.seq + head * strides.head;
    }
    __device__ __forceinline__ uint4* row(int i) const {
        return reinterpret_cast<uint4*>(static_cast<T*>(p.rows) + offset(i, p.row_strides)) + lane;
    }
    __device__ __forceinline__ uint2* codes(int i) const {
        return reinterpret_cast<uint2*>(p.codes + offset(i, p.code_strides)) + lane;
    }
    __device__ __forceinline__ float* scale(int i) const { return p.scales + offset(i, p.scale_strides); }
};

// The entries of 8 codes in 16 bits.
template <typename T>
__device__ __forceinline__ uint4 int8_vector(uint2 codes, float scale) {
    float low[4], high[4], wide[VECTOR];
    int8_entries(codes.x, low);
    int8_entries(codes.y, high);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        wide[j] = low[j] * scale;
        wide[4 + j] = high[j] * scale;
    }
    return narrow<T>(wide);
}

template <typename T, int D>
__device__ __forceinline__ void store_int8(const Int8Params& p) {
    using Lane = Int8Lane<T, D>;
    const Lane at(p);
    const uint32_t lanes_of_row = ((1u << Lane::LANES) - 1) << (threadIdx.x % 32 / Lane::LANES * Lane::LANES);
    uint4 x[INT8_ROWS];
#pragma unroll
    for (int i = 0; i < INT8_ROWS; ++i) {
        if (at.has(i)) x[i] = *at.row(i);
    }
#pragma unroll
    for (int i = 0; i < INT8_ROWS; ++i) {
        if (!at.has(i)) break;
        float wide[VECTOR], most = 0.f, not_finite = 0.f;  // the latter 0 or NaN
        widen<T>(x[i], wide);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            most = fmaxf(most, fabsf(wide[j]));
            not_finite = fmaf(wide[j], 0.f, not_finite);
        }
#pragma unroll
        for (int step = Lane::LANES / 2; step > 0; step /= 2) {
            most = fmaxf(most, __shfl_xor_sync(lanes_of_row, most, step));
            not_finite += __shfl_xor_sync(lanes_of_row, not_finite, step);
        }
        // Each operation rounds once, as on the host, so that the codes and scales are the same.
        const float scale = __fadd_rn(__fmul_rn(most, 1.f / INT8_MOST), not_finite);
        const float factor = __fmul_rn(__frcp_rn(fmaxf(most, INT8_LEAST)), INT8_MOST);
        uint32_t codes[2] = {};
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            const float code = floorf(__fadd_rn(__fmul_rn(wide[j], factor), INT8_HALF_UP));
            codes[j / 4] |= uint32_t(code) << 8 * (j % 4);
        }
        *at.codes(i) = make_uint2(codes[0], codes[1]);
        if (at.lane == 0) *at.scale(i) = scale;
        *at.row(i) = int8_vector<T>(make_uint2(codes[0], codes[1]), scale);
    }
}

template <typename T, int D>
__device__ __forceinline__ void load_int8(const Int8Params& p) {
    const Int8Lane<T, D> at(p);
    uint2 codes[INT8_ROWS];
    float scales[INT8_ROWS];
#pragma unroll
    for (int i = 0; i < INT8_ROWS; ++i) {
        if (at.has(i)) {
            codes[i] = *at.codes(i);
            scales[i] = *at.scale(i);
        }
    }
#pragma unroll
    for (int i = 0; i < INT8_ROWS; ++i) {
        if (at.has(i)) *at.row(i) = int8_vector<T>(codes[i], scales[i]);
    }
}

}  // namespace s2o

#define S2O_INT8_KERNEL(name, ...)                                                                                   \
    extern "C" {                                                                                                     \
    __constant__ s2o::LaunchInfo name##_launch = {s2o::INT8_THREADS, 0, 0, 0, s2o::OVERLAPS};                        \
    __global__ void __launch_bounds__(s2o::INT8_THREADS) name(const __grid_constant__ s2o::Int8Params p) {           \
        s2o::overlap();                                                                                              \
        __VA_ARGS__;                                                                                                 \
    }                                                                                                                \
    }

#define S2O_INT8_KERNELS(suffix, T, D)                                          \
    S2O_INT8_KERNEL(s2o_store_int8_##suffix##_##D, s2o::store_int8<T, D>(p))    \
    S2O_INT8_KERNEL(s2o_load_int8_##suffix##_##D, s2o::load_int8<T, D>(p))

S2O_INT8_KERNELS(bf16, __nv_bfloat16, 64)
S2O_INT8_KERNELS(bf16, __nv_bfloat16, 128)
S2O_INT8_KERNELS(f16, __half, 64)
S2O_INT8_KERNELS(f16, __half, 128)
