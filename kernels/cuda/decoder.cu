// The decoder's steps between matrix products and attention.
#include "decoder_params.cuh"
#include "decoder_row.cuh"
#include "launch.cuh"

namespace s2o {

template <typename T>
__device__ __forceinline__ void rms_norm(const NormParams& p) {
    uint4 x[ROW_VECTORS];
    normed_row<T>(p, x);
    const int count = p.width / VECTOR;
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int at = vector_place(i);
        if (at < count) *vectors(p.out, int64_t(blockIdx.x) * count + at) = x[i];
    }
}

constexpr int SILU_THREADS = 256;
constexpr int SILU_VECTORS = 4;  // of a thread: enough loads in flight at once

template <typename T>
__device__ __forceinline__ void silu_mul(const SiluParams& p) {
    const int64_t count = p.width / VECTOR, row = blockIdx.x;
    const int64_t first = int64_t(blockIdx.y) * (SILU_THREADS * SILU_VECTORS) + threadIdx.x;
    uint4 gates[SILU_VECTORS], ups[SILU_VECTORS];
#pragma unroll
    for (int i = 0; i < SILU_VECTORS; ++i) {
        const int64_t at = first + i * SILU_THREADS;
        if (at < count) {
            gates[i] = *vectors(p.gate_up, row * 2 * count + at);
            ups[i] = *vectors(p.gate_up, (row * 2 + 1) * count + at);
        }
    }
#pragma unroll
    for (int i = 0; i < SILU_VECTORS; ++i) {
        const int64_t at = first + i * SILU_THREADS;
        if (at < count) *vectors(p.out, row * count + at) = gated<T>(gates[i], ups[i]);
    }
}

constexpr int ROTATE_THREADS = 256;  // at most; the launch follows rotate_threads in src/decoder.rs
constexpr int ROTATE_HEADS = 2;      // of a thread: enough loads in flight at once

// Rotates a thread's entries of a head, after the norm if `norm` is not null.
template <typename T, int D>
__device__ __forceinline__ void turn(uint4& low, uint4& high, const void* norm, float eps, const float (&cos)[VECTOR],
                                     const float (&sin)[VECTOR]) {
    constexpr int LANES = D / (2 * VECTOR);
    const int lane = threadIdx.x % LANES;
    float x[VECTOR], y[VECTOR];
    widen<T>(low, x);
    widen<T>(high, y);
    if (norm) {
        const uint32_t lanes_of_head = ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) squares += x[j] * x[j] + y[j] * y[j];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) squares += __shfl_xor_sync(lanes_of_head, squares, step);
        const float scale = rsqrtf(squares / float(D) + eps);
        float x_weight[VECTOR], y_weight[VECTOR];
        widen<T>(*vectors(norm, lane), x_weight);
        widen<T>(*vectors(norm, LANES + lane), y_weight);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            x[j] *= scale * x_weight[j];
            y[j] *= scale * y_weight[j];
        }
    }
    float turned[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) turned[j] = x[j] * cos[j] - y[j] * sin[j];
    low = narrow<T>(turned);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) turned[j] = y[j] * cos[j] + x[j] * sin[j];
    high = narrow<T>(turned);
}

// A thread holds 8 entries of a head's first half and the 8 entries of the second half that they rotate with.
template <typename T, int D>
__device__ __forceinline__ void rotate(const RotateParams& p) {
    constexpr int LANES = D / (2 * VECTOR);
    static_assert(LANES < 32 && 32 % LANES == 0, "a head's lanes are of one warp");
    const int row = blockIdx.x, batch = row / p.len, position = row % p.len;
    const int lane = threadIdx.x % LANES, stride = blockDim.x / LANES;
    const int turned_heads = p.num_heads + p.num_kv_heads, heads = turned_heads + p.num_kv_heads;
    float cos[VECTOR], sin[VECTOR];
    const float* angles = p.table + (int64_t(position) * LANES + lane) * VECTOR;
#pragma unroll
    for (int j = 0; j < VECTOR; j += 4) {
        *reinterpret_cast<float4*>(cos + j) = *reinterpret_cast<const float4*>(angles + j);
        *reinterpret_cast<float4*>(sin + j) =
            *reinterpret_cast<const float4*>(angles + int64_t(p.len) * LANES * VECTOR + j);
    }
    for (int first = threadIdx.x / LANES; first < heads; first += ROTATE_HEADS * stride) {
        uint4 low[ROTATE_HEADS], high[ROTATE_HEADS];
#pragma unroll
        for (int i = 0; i < ROTATE_HEADS; ++i) {
            const int head = first + i * stride;
            if (head < heads) {
                const uint4* in = vectors(p.qkv, (int64_t(row) * heads + head) * (2 * LANES) + lane);
                low[i] = in[0];
                high[i] = in[LANES];
            }
        }
#pragma unroll
        for (int i = 0; i < ROTATE_HEADS; ++i) {
            const int head = first + i * stride;
            if (head >= heads) break;
            T* out;
            if (head < p.num_heads) {
                out = static_cast<T*>(p.q_out) + (int64_t(row) * p.num_heads + head) * D;
                turn<T, D>(low[i], high[i], p.q_norm, p.eps, cos, sin);
            } else if (head < turned_heads) {
                out = static_cast<T*>(p.k_out) + batch * p.k_strides.batch + position * p.k_strides.seq +
                      (head - p.num_heads) * p.k_strides.head;
                turn<T, D>(low[i], high[i], p.k_norm, p.eps, cos, sin);
            } else {
                out = static_cast<T*>(p.v_out) + batch * p.v_strides.batch + position * p.v_strides.seq +
                      (head - turned_heads) * p.v_strides.head;
            }
            *vectors(out, lane) = low[i];
            *vectors(out, LANES + lane) = high[i];
        }
    }
}

constexpr int TABLE_THREADS = 256;

__device__ __forceinline__ void rotation_table(const RotationParams& p) {
    const int64_t at = int64_t(blockIdx.x) * TABLE_THREADS + threadIdx.x, count = int64_t(p.len) * p.half;
    if (at >= count) return;
    // The product of a position and an f32 frequency is exact in f64; in f32 it would be 0.03 rad off at position 500K.
    const double angle = double(p.start + at / p.half) * double(p.inverse_frequencies[at % p.half]);
    double sin, cos;
    // In half turns, because reducing an angle of any size modulo 2 pi takes a slow path.
    sincospi(angle * 0.31830988618379067154, &sin, &cos);
    p.table[at] = float(cos * p.factor);
    p.table[count + at] = float(sin * p.factor);
}

}  // namespace s2o

// A LaunchInfo with 0 threads leaves their number to the launch.
#define S2O_DECODER_KERNEL(name, threads, max_threads, min_blocks, params, ...)                                    \
    extern "C" {                                                                                                  \
    __constant__ s2o::LaunchInfo name##_launch = {threads, 0, 0, 0, s2o::OVERLAPS};                                \
    __global__ void __launch_bounds__(max_threads, min_blocks) name(const __grid_constant__ s2o::params p) {      \
        s2o::overlap();                                                                                           \
        __VA_ARGS__;                                                                                              \
    }                                                                                                             \
    }

// Four blocks per multiprocessor keep the rotation at 64 registers; 0 sets no minimum.
#define S2O_DECODER_KERNELS(suffix, T)                                                                             \
    S2O_DECODER_KERNEL(s2o_rms_norm_##suffix, 0, s2o::ROW_THREADS, 0, NormParams, s2o::rms_norm<T>(p))              \
    S2O_DECODER_KERNEL(s2o_silu_mul_##suffix, s2o::SILU_THREADS, s2o::SILU_THREADS, 0, SiluParams,                  \
                       s2o::silu_mul<T>(p))                                                                         \
    S2O_DECODER_KERNEL(s2o_rotate_##suffix##_64, 0, s2o::ROTATE_THREADS, 4, RotateParams, s2o::rotate<T, 64>(p))    \
    S2O_DECODER_KERNEL(s2o_rotate_##suffix##_128, 0, s2o::ROTATE_THREADS, 4, RotateParams, s2o::rotate<T, 128>(p))

S2O_DECODER_KERNELS(bf16, __nv_bfloat16)
S2O_DECODER_KERNELS(f16, __half)

S2O_DECODER_KERNEL(s2o_rotation_table, s2o::TABLE_THREADS, s2o::TABLE_THREADS, 0, RotationParams,
                   s2o::rotation_table(p))
