// Means of blocks of queries or keys: every token is read once, in place.
#include <cfloat>

#include "launch.cuh"
#include "pair.cuh"
#include "selection_params.cuh"

namespace s2o {

constexpr int POOL_THREADS = 256;
constexpr int POOL_WARPS = POOL_THREADS / 32;
constexpr int POOL_VECTOR = 8;    // elements of a 16-byte load
constexpr int POOL_IN_FLIGHT = 4; // loads of a thread before it computes

// Sum over the lanes that differ in the bits `first_step` to `last_step`, returned to each of them.
__device__ __forceinline__ float sum_of_lanes(float x, int first_step, int last_step) {
    for (int step = first_step; step <= last_step; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

template <typename T, int D, bool SELF_SIMILARITY>
__device__ __forceinline__ void pool_block(const BlockPoolParams& p) {
    constexpr int LANES = D / POOL_VECTOR;         // of a token
    constexpr int TOKENS = POOL_THREADS / LANES;  // at a time
    static_assert(32 % LANES == 0, "a token's lanes are of one warp");
    // The head varies fastest: a token's heads are contiguous, so neighbouring blocks read neighbouring memory.
    const int64_t item = blockIdx.x, of_head = item / p.heads;
    const int64_t head = item % p.heads, block = of_head % p.blocks, batch = of_head / p.blocks;
    const int64_t start = (p.offset / p.block + block) * p.block - p.offset;
    const int64_t begin = start > 0 ? start : 0, end = min(start + p.block, p.len);
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const T* x = static_cast<const T*>(p.x) + batch * p.strides.batch + head * p.strides.head + lane * POOL_VECTOR;

    float sums[POOL_VECTOR] = {}, units[POOL_VECTOR] = {}, centre[POOL_VECTOR] = {};
    if (p.centre) {
        const float* of_lane = p.centre + (batch * p.heads + head) * D + lane * POOL_VECTOR;
#pragma unroll
        for (int j = 0; j < POOL_VECTOR; ++j) centre[j] = of_lane[j];
    }
    for (int64_t first = begin; first < end; first += TOKENS * POOL_IN_FLIGHT) {
        uint4 loaded[POOL_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < POOL_IN_FLIGHT; ++i) {
            const int64_t token = first + i * TOKENS + slot;
            loaded[i] = make_uint4(0, 0, 0, 0);
            if (token < end) loaded[i] = *reinterpret_cast<const uint4*>(x + token * p.strides.seq);
        }
#pragma unroll
        for (int i = 0; i < POOL_IN_FLIGHT; ++i) {
            const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
            const bool there = first + i * TOKENS + slot < end;
            float wide[POOL_VECTOR];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = unpack<T>(words[j]);
                wide[2 * j] = there ? pair.x - centre[2 * j] : 0.f;
                wide[2 * j + 1] = there ? pair.y - centre[2 * j + 1] : 0.f;
            }
            float squares = 0.f;
#pragma unroll
            for (int j = 0; j < POOL_VECTOR; ++j) {
                sums[j] += wide[j];
                squares += wide[j] * wide[j];
            }
            if constexpr (SELF_SIMILARITY) {
                const float norm = sqrtf(sum_of_lanes(squares, 1, LANES / 2));
                const float scale = __fdividef(1.f, fmaxf(norm, FLT_MIN));
#pragma unroll
                for (int j = 0; j < POOL_VECTOR; ++j) units[j] += wide[j] * scale;
            }
        }
    }

    __shared__ float of_warps[SELF_SIMILARITY ? 2 : 1][POOL_WARPS][D];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < POOL_VECTOR; ++j) {
        const float sum = sum_of_lanes(sums[j], LANES, 16);
        if (threadIdx.x % 32 < LANES) of_warps[0][warp][lane * POOL_VECTOR + j] = sum;
        if constexpr (SELF_SIMILARITY) {
            const float unit = sum_of_lanes(units[j], LANES, 16);
            if (threadIdx.x % 32 < LANES) of_warps[1][warp][lane * POOL_VECTOR + j] = unit;
        }
    }
    __syncthreads();
    const float count = float(end - begin);
    const int64_t out = (batch * p.heads + head) * p.blocks + block;
    float square = 0.f;
    if (threadIdx.x < D) {
        float sum = 0.f, unit = 0.f;
#pragma unroll
        for (int i = 0; i < POOL_WARPS; ++i) {
            sum += of_warps[0][i][threadIdx.x];
            if constexpr (SELF_SIMILARITY) unit += of_warps[1][i][threadIdx.x];
        }
        p.means[out * D + threadIdx.x] = sum / count;
        square = (unit / count) * (unit / count);
    }
    if constexpr (SELF_SIMILARITY) {
        __shared__ float squares_of_warps[D / 32];
        square = sum_of_lanes(square, 1, 16);
        if (threadIdx.x < D && threadIdx.x % 32 == 0) squares_of_warps[warp] = square;
        __syncthreads();
        if (threadIdx.x == 0) {
            float self_similarity = 0.f;
#pragma unroll
            for (int i = 0; i < D / 32; ++i) self_similarity += squares_of_warps[i];
            p.self_similarity[out] = self_similarity;
        }
    }
}

template <typename T, int D>
__device__ __forceinline__ void block_pool(const BlockPoolParams& p) {
    if (p.self_similarity) {
        pool_block<T, D, true>(p);
    } else {
        pool_block<T, D, false>(p);
    }
}

}  // namespace s2o

#define S2O_BLOCK_POOL(suffix, T, D)                                                                             \
    extern "C" {                                                                                                 \
    __constant__ s2o::LaunchInfo s2o_block_pool_##suffix##_##D##_launch = {s2o::POOL_THREADS, 0, 0, 0};          \
    __global__ void __launch_bounds__(s2o::POOL_THREADS)                                                         \
        s2o_block_pool_##suffix##_##D(const __grid_constant__ s2o::BlockPoolParams p) {                          \
        s2o::block_pool<T, D>(p);                                                                                \
    }                                                                                                            \
    }

S2O_BLOCK_POOL(bf16, __nv_bfloat16, 64)
S2O_BLOCK_POOL(bf16, __nv_bfloat16, 128)
S2O_BLOCK_POOL(f16, __half, 64)
S2O_BLOCK_POOL(f16, __half, 128)
