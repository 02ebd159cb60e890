// Mean and variance of the columns of a matrix in 16 bits. Sums are of distances from each thread's first row, and partial
// results are merged with their means, so that the variance stays accurate far from zero.
#pragma once
#include <cstdint>

#include "ranking_element.cuh"

namespace s2o {

constexpr int MOMENT_THREADS = 256;

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

// The moment of column threadIdx.x < D over those of `rows` rows that are finite. row_at(i) is the address of a row. All
// threads of a CTA of MOMENT_THREADS call it. A thread loads IN_FLIGHT rows at once. D / 8 neighbouring lanes have a row.
// take(first, words) gets eight columns of this thread's rows first + i * MOMENT_THREADS * 8 / D, some of which may not exist.
template <typename T, int D, int IN_FLIGHT, class RowAt, class Take>
__device__ __forceinline__ Moment column_moment(int rows, RowAt row_at, Take take) {
    constexpr int LANES = D / 8, ROWS = MOMENT_THREADS / LANES, WARPS = MOMENT_THREADS / 32;
    const int chunk = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    float shift[8] = {}, sum[8] = {}, square[8] = {};
    int count = 0;
    auto start = [&](const uint4& row) {
        const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 x = Packed<T>::floats(words[w]);
            shift[2 * w] = x.x;
            shift[2 * w + 1] = x.y;
        }
    };
    auto add = [&](const uint4& row) {
        const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 x = Packed<T>::floats(words[w]);
            const float low = x.x - shift[2 * w], high = x.y - shift[2 * w + 1];
            sum[2 * w] += low;
            sum[2 * w + 1] += high;
            square[2 * w] = fmaf(low, low, square[2 * w]);
            square[2 * w + 1] = fmaf(high, high, square[2 * w + 1]);
        }
    };
    const uint32_t lane_group = ((1ull << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
    for (int first = 0; first < rows; first += ROWS * IN_FLIGHT) {
        uint4 loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int row = first + slot + i * ROWS;
            // A row that does not exist is marked as not finite and so left out.
            loaded[i] = make_uint4(NAN_WORD, 0, 0, 0);
            if (row < rows) loaded[i] = __ldcs(reinterpret_cast<const uint4*>(row_at(row) + chunk * 8));
        }
        uint32_t not_finite = 0;
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) not_finite |= Packed<T>::not_finite(loaded[i]);
        // One vote for all of them, because nearly all are finite.
        if (!__any_sync(~0u, not_finite != 0)) {
            if (first == 0) start(loaded[0]);
            count += IN_FLIGHT;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) add(loaded[i]);
        } else {
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                if (__ballot_sync(~0u, Packed<T>::not_finite(loaded[i]) != 0) & lane_group) continue;
                if (i == 0 && first == 0) start(loaded[0]);
                count += 1;
                add(loaded[i]);
            }
        }
        take(first + slot, loaded);
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
    return moment;
}

}  // namespace s2o
