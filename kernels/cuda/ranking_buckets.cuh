// Maps the 16-bit scores of a row to buckets in descending order of score.
//
// Bucket 0 holds the scores that are not finite, bucket 1 the front sink and the recent keys. The place of any other
// score is a sum of two maps with half of the buckets each: its place between the row's extremes, and
// u / sqrt(1 + u^2), where u is its distance from the row's centre over the row's spread, both from a sample. The first
// map keeps the resolution at range / (buckets / 2) everywhere, the second fills the buckets evenly if outliers stretch
// the range.
#pragma once
#include <cstdint>

#include "ranking_params.cuh"

namespace s2o {

constexpr int NOT_FINITE_BUCKET = 0, LEAD_BUCKET = 1, FIRST_BUCKET = 2;

// Shared memory of ScoreRow::fit.
struct FitShared {
    float2 extremes[32];  // of each warp
    float centre, per_spread;
};

__device__ __forceinline__ float2 warp_extremes(float2 x) {
#pragma unroll
    for (int s = 16; s; s /= 2) {
        x.x = fminf(x.x, __shfl_xor_sync(~0u, x.x, s));
        x.y = fmaxf(x.y, __shfl_xor_sync(~0u, x.y, s));
    }
    return x;
}

// Mean of the middle two.
__device__ __forceinline__ float middle(const float (&x)[4]) {
    const float greater_of_least = fmaxf(fminf(x[0], x[1]), fminf(x[2], x[3]));
    const float lesser_of_greatest = fminf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    return 0.5f * (greater_of_least + lesser_of_greatest);
}

// The value with 16 of the warp's other values below it.
__device__ __forceinline__ float warp_median(float x) {
    const int lane = threadIdx.x % 32;
    int below = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const float other = __shfl_sync(~0u, x, i);
        below += other < x || (other == x && i < lane);
    }
    return __shfl_sync(~0u, x, __ffs(__ballot_sync(~0u, below == 16)) - 1);
}

struct ScoreRow {
    uint16_t* codes;
    const float2* ranges;
    int length, front_sink, recent_from, buckets;
    float centre, per_spread, highest, per_range;

    // Number of keys of the front sink and the recent keys: of LEAD_BUCKET, if all their scores are finite.
    __device__ __forceinline__ int lead_keys() const {
        return length - max(max(recent_from, 0) - min(front_sink, length), 0);
    }
    // Number `i` of them, in the order of their tokens.
    __device__ __forceinline__ int lead_key(int i) const { return i < front_sink ? i : length - lead_keys() + i; }

    __device__ __forceinline__ static float code_value(uint32_t word, bool high) {
        // The bits below the code are set to their middle.
        return __uint_as_float(__byte_perm(word, 0x00004080, high ? 0x5324 : 0x5104));
    }

    // Buckets of the eight scores of vector `v`.
    __device__ __forceinline__ void buckets_of(uint4 codes, float2 range, int v, uint32_t (&bucket)[8]) const {
        const float factor = fabsf(range.x) * per_spread, offset = (range.y - centre) * per_spread;
        // Each map takes `share` buckets.
        const float share = 0.5f * (buckets - FIRST_BUCKET - 2), start = FIRST_BUCKET + 0.5f + 0.5f * share;
        const float slope = -share * per_range * fabsf(range.x);
        const float intercept = fmaf(share * per_range, highest - range.y, start);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float code = code_value(words[i / 2], i % 2), u = fmaf(code, factor, offset);
            float reciprocal;
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(fmaf(u, u, 1.f)));
            const float place = fmaf(u * reciprocal, -0.5f * share, fmaf(code, slope, intercept));
            // 2^23 puts the rounded bucket into the low bits.
            bucket[i] = min(__float_as_uint(place + 8388608.f) - 0x4b000000u, uint32_t(buckets - 1));
        }
        const bool not_finite = __float_as_uint(range.x) >> 31;
        if (not_finite || v * 8 < front_sink || v * 8 + 8 > recent_from) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (v * 8 + i < front_sink || v * 8 + i >= recent_from) bucket[i] = LEAD_BUCKET;
                if ((words[i / 2] >> (i % 2 * 16) & 0xffff) == SCORE_NOT_FINITE) bucket[i] = NOT_FINITE_BUCKET;
            }
        }
    }

    // Finds the extremes of the row, and centre and spread of a sample of 128 scores as medians, which outliers do not
    // move. All threads call it; it contains a barrier.
    __device__ __forceinline__ void fit(FitShared& shared) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
        if (warp == 0) {
            float sample[4], distance[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = (4 * lane + i) * (length / 128);
                const uint32_t code = codes[at];
                const float2 range = ranges[at / SCORE_BLOCK];
                sample[i] =
                    code == SCORE_NOT_FINITE ? INFINITY : fmaf(code_value(code, false), fabsf(range.x), range.y);
            }
            const float median = warp_median(middle(sample));
#pragma unroll
            for (int i = 0; i < 4; ++i) distance[i] = fabsf(sample[i] - median);
            // 1.25 standard deviations of a normal row.
            const float spread = 1.85f * warp_median(middle(distance));
            if (lane == 0) {
                shared.centre = fabsf(median) < INFINITY ? median : 0.f;
                shared.per_spread = 1.f / spread;
            }
        }
        float2 x = make_float2(INFINITY, -INFINITY);
        // Warp 0 comes last, because it has the sample.
        for (int i = warp > 0 ? threadIdx.x - 32 : lane + blockDim.x - 32; i < length / SCORE_BLOCK; i += blockDim.x) {
            const float2 block = ranges[i];
            const float low = fmaf(SCORE_CODE_START, fabsf(block.x), block.y);
            x.x = fminf(x.x, low);
            x.y = fmaxf(x.y, fmaf(SCORE_CODE_SPAN, fabsf(block.x), low));
        }
        x = warp_extremes(x);
        if (lane == 0) shared.extremes[warp] = x;
        __syncthreads();
        x = warp_extremes(lane < warps ? shared.extremes[lane] : make_float2(INFINITY, -INFINITY));
        const float span = x.y - x.x;
        const bool bounded = span > 1e-30f && span < INFINITY;
        centre = shared.centre;
        highest = bounded ? x.y : 0.f;
        per_range = bounded ? 1.f / span : 0.f;
        // At least a millionth of the range, so that the map does not overflow. fminf also drops the NaN of a sample.
        per_spread = fminf(shared.per_spread, 1e6f * per_range);
    }
};

}  // namespace s2o
