// Weights of blocks of key strides for blocks of query strides: a softmax of each row of products, summed over square
// blocks of rows and columns.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"
#include "online_softmax.cuh"
#include "pair.cuh"

namespace s2o {

constexpr int STRIDE_SHARE_THREADS = 256;
constexpr int STRIDE_SHARE_ROWS = 128;  // largest block of strides

struct StrideSharesParams {
    const void* products;    // (num_heads, rows, columns)
    const uint32_t* limits;  // (rows): columns that a row sees, at most `columns`; 0: the row adds nothing
    float* out;              // (num_heads, rows / per_block, key_blocks), zeros beyond the columns
    int32_t rows;            // a multiple of per_block
    int32_t columns;         // a multiple of per_block
    int32_t per_block;       // strides of a block, a power of two up to STRIDE_SHARE_ROWS
    int32_t key_blocks;
    float scale;
};
static_assert(sizeof(StrideSharesParams) == 48 && offsetof(StrideSharesParams, rows) == 24, "mirrored on the host");

// Reads N scaled products from `column`, a multiple of N. Products from `limit` on are -inf.
template <typename T, int N>
__device__ __forceinline__ void stride_scores(float (&x)[N], const T* row, int column, int limit, float scale_log2) {
    if constexpr (N == 8) {
        const uint4 packed = *reinterpret_cast<const uint4*>(row + column);
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack<T>(words[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = float(row[column + i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = column + i < limit ? x[i] * scale_log2 : -INFINITY;
}

// N: columns read at once, a divisor of per_block. Every row is read twice, the second time from L2.
template <typename T, int N>
__device__ __forceinline__ void stride_shares(const StrideSharesParams& p) {
    __shared__ float references[STRIDE_SHARE_ROWS], factors[STRIDE_SHARE_ROWS];
    __shared__ int limits[STRIDE_SHARE_ROWS];
    constexpr int WARPS = STRIDE_SHARE_THREADS / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, head = blockIdx.y;
    const float scale_log2 = p.scale * LOG2_E;
    const T* rows =
        static_cast<const T*>(p.products) + (int64_t(head) * p.rows + int64_t(block) * p.per_block) * p.columns;
    for (int row = warp; row < p.per_block; row += WARPS) {
        const int limit = min(p.limits[block * p.per_block + row], uint32_t(p.columns));
        float maximum = -INFINITY, sum = 0.f;
#pragma unroll 2
        for (int column = lane * N; column < limit; column += 32 * N) {
            float x[N];
            stride_scores<T, N>(x, rows + int64_t(row) * p.columns, column, limit, scale_log2);
            float raised = maximum;
#pragma unroll
            for (int i = 0; i < N; ++i) raised = fmaxf(raised, x[i]);
            // 16-bit products can overflow, so the first products may be -inf.
            const float reference = raised == -INFINITY ? 0.f : raised;
            sum *= exp2_approx(maximum - reference);
            maximum = raised;
#pragma unroll
            for (int i = 0; i < N; ++i) sum += exp2_approx(x[i] - reference);
        }
        float of_row = maximum;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) of_row = fmaxf(of_row, __shfl_xor_sync(~0u, of_row, step));
        // A lane without a column has nothing to add.
        sum = sum > 0.f ? sum * exp2_approx(maximum - of_row) : sum;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) {
            limits[row] = limit;
            references[row] = of_row;
            factors[row] = 1.f / sum;
        }
    }
    __syncthreads();
    float* out = p.out + (int64_t(head) * (p.rows / p.per_block) + block) * p.key_blocks;
    for (int key_block = threadIdx.x; key_block < p.key_blocks; key_block += STRIDE_SHARE_THREADS) {
        float share = 0.f;
        const int first = key_block * p.per_block;
#pragma unroll 4
        for (int row = 0; row < p.per_block; ++row) {
            const int limit = limits[row];
            if (first >= limit) continue;
            float of_row = 0.f;
            for (int column = first; column < min(first + p.per_block, limit); column += N) {
                float x[N];
                stride_scores<T, N>(x, rows + int64_t(row) * p.columns, column, limit, scale_log2);
#pragma unroll
                for (int i = 0; i < N; ++i) of_row += exp2_approx(x[i] - references[row]);
            }
            share += of_row * factors[row];
        }
        out[key_block] = share;
    }
}

// Grid (rows / per_block, num_heads).
template <typename T>
__device__ __forceinline__ void stride_shares(const StrideSharesParams& p) {
    if (p.per_block % 8 == 0) {
        stride_shares<T, 8>(p);
    } else {
        stride_shares<T, 1>(p);
    }
}

}  // namespace s2o

#define S2O_STRIDE_SHARES_KERNEL(suffix, T)                                                                           \
    extern "C" {                                                                                                      \
    __constant__ s2o::LaunchInfo s2o_stride_shares_##suffix##_launch = {s2o::STRIDE_SHARE_THREADS, 0, 0, 0};          \
    __global__ void __launch_bounds__(s2o::STRIDE_SHARE_THREADS)                                                      \
        s2o_stride_shares_##suffix(const __grid_constant__ s2o::StrideSharesParams p) {                               \
        s2o::stride_shares<T>(p);                                                                                     \
    }                                                                                                                 \
    }

S2O_STRIDE_SHARES_KERNEL(bf16, __nv_bfloat16)
S2O_STRIDE_SHARES_KERNEL(f16, __half)
