// The query permutation: sorts a segment's queries by their product with the mean of the first segment's keys.
#pragma once
#include <cstdint>

#include "ranking_element.cuh"
#include "ranking_params.cuh"

namespace s2o {

constexpr int GUIDE_THREADS = 1024;
constexpr int QUERY_ORDER_THREADS = 512;

// Bytes of shared memory for the queries of one segment.
__host__ __device__ constexpr int query_order_shared_bytes(int segment_len) { return segment_len * 8; }

// Grid (num_kv_heads, batch), GUIDE_THREADS threads, no dynamic shared memory.
template <typename T, int D>
__device__ void key_guide(const RankingParams& p) {
    constexpr int LANES = D / 8, ROWS = GUIDE_THREADS / LANES;
    __shared__ float sums[ROWS][D + 1];
    const int chunk = threadIdx.x % LANES, slot = threadIdx.x / LANES, count = min(p.segment_len, p.k_len);
    const T* k =
        static_cast<const T*>(p.k) + blockIdx.y * p.k_strides.batch + blockIdx.x * p.k_strides.head + chunk * 8;
    float sum[8] = {};
#pragma unroll 8
    for (int row = slot; row < count; row += ROWS) {
        const uint4 x = *reinterpret_cast<const uint4*>(k + row * p.k_strides.seq);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = Packed<T>::floats(words[w]);
            sum[2 * w] += pair.x;
            sum[2 * w + 1] += pair.y;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[slot][chunk * 8 + i] = sum[i];
    __syncthreads();
    for (int half = ROWS / 2; half > 0; half /= 2) {
        for (int i = threadIdx.x; i < half * D; i += GUIDE_THREADS) sums[i / D][i % D] += sums[i / D + half][i % D];
        __syncthreads();
    }
    if (threadIdx.x < D) {
        p.key_guide[(int64_t(blockIdx.y) * p.num_kv_heads + blockIdx.x) * D + threadIdx.x] =
            sums[0][threadIdx.x] / count;
    }
}

// Ascending keys put scores that are not finite first, then larger scores first, and equal scores by index.
__device__ __forceinline__ uint64_t descending_key(float score, uint32_t index) {
    const uint32_t bits = __float_as_uint(fabsf(score) < INFINITY ? score + 0.f : INFINITY);
    return uint64_t(bits >> 31 ? bits : ~bits & 0x7fffffff) << 32 | index;
}

// Grid (num_heads, num_segments, batch), QUERY_ORDER_THREADS threads, query_order_shared_bytes(segment_len) dynamic
// shared memory (opt in above 48 KiB).
template <typename T, int D>
__device__ void query_order(const RankingParams& p) {
    constexpr int LANES = D / 8, ROWS = QUERY_ORDER_THREADS / LANES;
    extern __shared__ __align__(128) uint64_t keys[];
    const int head = blockIdx.x, b = blockIdx.z, kv_head = head / (p.num_heads / p.num_kv_heads);
    const SegmentRows rows = segment_rows(p, p.first_segment + blockIdx.y);
    const int ranked = max(min(rows.end, p.ranked_rows) - rows.begin, 0), chunk = threadIdx.x % LANES;
    const T* q = static_cast<const T*>(p.q) + b * p.q_strides.batch + head * p.q_strides.head + chunk * 8;
    const float* guide = p.key_guide + (int64_t(b) * p.num_kv_heads + kv_head) * D + chunk * 8;
    float weight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] = guide[i];
    for (int first = 0; first < ranked; first += ROWS) {
        const int i = first + threadIdx.x / LANES;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (i < ranked) x = *reinterpret_cast<const uint4*>(q + (rows.begin + i) * p.q_strides.seq);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        float sum = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = Packed<T>::floats(words[w]);
            sum = fmaf(pair.x, weight[2 * w], fmaf(pair.y, weight[2 * w + 1], sum));
        }
#pragma unroll
        for (int s = LANES / 2; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
        if (i < ranked && chunk == 0) keys[i] = descending_key(sum, i);
    }
    __syncthreads();
    // Bitonic sort; every exchange puts the smaller key first, so that no length needs padding.
    for (int size = 2; size < 2 * ranked; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            const int flip = stride == size / 2 ? size - 1 : stride;
            for (int pair = threadIdx.x; pair * 2 < ranked + size; pair += QUERY_ORDER_THREADS) {
                const int i = pair / stride * 2 * stride + pair % stride, j = i ^ flip;
                if (j < ranked) {
                    const uint64_t low = min(keys[i], keys[j]), high = max(keys[i], keys[j]);
                    keys[i] = low;
                    keys[j] = high;
                }
            }
            __syncthreads();
        }
    }
    int32_t* out = p.q_perm + (int64_t(b) * p.num_heads + head) * p.q_len + rows.begin;
    for (int i = threadIdx.x; i < rows.end - rows.begin; i += QUERY_ORDER_THREADS) {
        out[i] = rows.begin + (i < ranked ? int(uint32_t(keys[i])) : i);
    }
}

}  // namespace s2o
