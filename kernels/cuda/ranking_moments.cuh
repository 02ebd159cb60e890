// Mean and variance of a segment's queries, and from them the coefficients of the score:
//   score(k) = sum_d (scale mean_d) k_d + (c scale^2 var_d) k_d^2
// The mean part is kept as two 16-bit numbers, high and low; the variance part as one bf16.
//
// Sums are of distances from each thread's first row, and partial results are merged with their means, so that the
// variance stays accurate far from zero. Queries that are not finite are left out, because they would spoil the order.
#pragma once
#include <cstdint>

#include "ranking_element.cuh"
#include "ranking_params.cuh"

namespace s2o {

constexpr int MOMENT_THREADS = 256;
constexpr int MOMENT_ROWS_IN_FLIGHT = 4;  // per thread, with four CTAs on a multiprocessor

struct Moment {
    float count, mean, square;  // square: sum of squared distances from the mean

    __device__ __forceinline__ void merge(const Moment& other) {
        const float sum = count + other.count, share = sum > 0.f ? other.count / sum : 0.f,
                    distance = other.mean - mean;
        mean = fmaf(distance, share, mean);
        square += fmaf(distance * distance, count * share, other.square);
        count = sum;
    }
};

// One column of the coefficients from its moment. All threads of the CTA call it.
template <typename T, int D>
__device__ void store_coefficients(const RankingParams& p, uint16_t* out, int d, const Moment& moment) {
    float mean = p.softmax_scale * moment.mean;
    float var = p.second_cumulant * p.softmax_scale * p.softmax_scale * (moment.square / fmaxf(moment.count, 1.f));
    if constexpr (Packed<T>::NARROW_RANGE) {
        // A power of two that puts the largest mean near 1, so that the low part stays above the smallest f16 numbers.
        __shared__ float largest[MOMENT_THREADS / 32];
        float m = d < D ? fabsf(mean) : 0.f;
#pragma unroll
        for (int x = 16; x; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
        if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = m;
        __syncthreads();
        for (int w = 0; w < MOMENT_THREADS / 32; ++w) m = fmaxf(m, largest[w]);
        const float factor = m > 0.f ? exp2f(fminf(fmaxf(-floorf(log2f(m)), -100.f), 100.f)) : 1.f;
        mean *= factor;
        var *= factor;
    }
    if (d >= D) return;
    const T high = T(mean);
    reinterpret_cast<T*>(out)[d] = high;
    reinterpret_cast<T*>(out)[D + d] = T(mean - float(high));
    reinterpret_cast<__nv_bfloat16*>(out)[2 * D + d] = __nv_bfloat16(var);
}

// Grid (num_heads, num_segments, batch * splits), MOMENT_THREADS threads, no dynamic shared memory. Splits share the
// rows of a segment; the CTA that arrives last merges the partial results in the order of the splits.
template <typename T, int D>
__device__ void segment_moments(const RankingParams& p) {
    constexpr int LANES = D / 8, ROWS = MOMENT_THREADS / LANES, WARPS = MOMENT_THREADS / 32;
    const int splits = gridDim.z / p.batch, head = blockIdx.x, segment = blockIdx.y;
    const int b = blockIdx.z / splits, split = blockIdx.z % splits;
    const int n = p.first_segment + segment;
    if (n == 0) return;  // no keys before it
    const SegmentRows rows = segment_rows(p, n);
    const int share = (rows.end - rows.begin + splits - 1) / splits;
    const int begin = rows.begin + split * share, end = min(begin + share, rows.end);
    const int chunk = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const T* q = static_cast<const T*>(p.q) + b * p.q_strides.batch + head * p.q_strides.head + chunk * 8;

    uint32_t shift_words[4] = {};
    float shift[8] = {}, sum[8] = {}, square[8] = {};
    int count = 0;
    const uint32_t lane_group = ((1ull << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
    for (int first = begin; first < end; first += ROWS * MOMENT_ROWS_IN_FLIGHT) {
        uint4 loaded[MOMENT_ROWS_IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < MOMENT_ROWS_IN_FLIGHT; ++i) {
            const int row = first + slot + i * ROWS;
            // A row that does not exist is marked as not finite and so left out.
            loaded[i] = make_uint4(NAN_WORD, 0, 0, 0);
            if (row < end) loaded[i] = __ldcs(reinterpret_cast<const uint4*>(q + row * p.q_strides.seq));
        }
#pragma unroll
        for (int i = 0; i < MOMENT_ROWS_IN_FLIGHT; ++i) {
            const bool finite = (__ballot_sync(~0u, Packed<T>::not_finite(loaded[i]) != 0) & lane_group) == 0;
            uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
            if (i == 0 && first == begin && finite) {
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    shift_words[w] = words[w];
                    const float2 x = Packed<T>::floats(words[w]);
                    shift[2 * w] = x.x;
                    shift[2 * w + 1] = x.y;
                }
            }
            count += finite;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float2 x = Packed<T>::floats(finite ? words[w] : shift_words[w]);
                const float low = x.x - shift[2 * w], high = x.y - shift[2 * w + 1];
                sum[2 * w] += low;
                sum[2 * w + 1] += high;
                square[2 * w] = fmaf(low, low, square[2 * w]);
                square[2 * w + 1] = fmaf(high, high, square[2 * w + 1]);
            }
        }
    }

    __shared__ float means[WARPS][D], squares[WARPS][D], counts[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float merged_count = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float reciprocal = 1.f / fmaxf(float(count), 1.f), average = sum[i] * reciprocal;
        Moment m{float(count), shift[i] + average, fmaxf(fmaf(-sum[i], average, square[i]), 0.f)};
#pragma unroll
        for (int x = LANES; x < 32; x *= 2) {
            m.merge(
                {__shfl_xor_sync(~0u, m.count, x), __shfl_xor_sync(~0u, m.mean, x), __shfl_xor_sync(~0u, m.square, x)});
        }
        merged_count = m.count;
        if (lane < LANES) {
            means[warp][chunk * 8 + i] = m.mean;
            squares[warp][chunk * 8 + i] = m.square;
        }
    }
    if (lane == 0) counts[warp] = merged_count;
    __syncthreads();
    const int d = threadIdx.x;
    Moment moment{0, 0, 0};
    if (d < D) {
        for (int w = 0; w < WARPS; ++w) moment.merge({counts[w], means[w][d], squares[w][d]});
    }
    const int64_t row = (int64_t(b) * p.num_heads + head) * p.num_segments + segment;
    if (splits > 1) {
        constexpr int PARTIAL = 2 * D + 1;
        float* partials = p.partial_moments + row * splits * PARTIAL;
        float* mine = partials + split * PARTIAL;
        if (d < D) {
            mine[d] = moment.mean;
            mine[D + d] = moment.square;
            if (d == 0) mine[2 * D] = moment.count;
        }
        __threadfence();
        __syncthreads();
        __shared__ bool last;
        if (threadIdx.x == 0) last = atomicInc(p.arrivals + row, splits - 1) == uint32_t(splits - 1);
        __syncthreads();
        if (!last) return;
        __threadfence();
        moment = {0, 0, 0};
        if (d < D) {
#pragma unroll 4
            for (int s = 0; s < splits; ++s) {
                const float* other = partials + s * PARTIAL;
                moment.merge({__ldcg(other + 2 * D), __ldcg(other + d), __ldcg(other + D + d)});
            }
        }
    }
    store_coefficients<T, D>(p, static_cast<uint16_t*>(p.coefficients) + coefficient_offset<D>(p, b, head, n), d,
                             moment);
}

}  // namespace s2o
