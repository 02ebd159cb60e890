// From a row of 16-bit scores to buckets in descending order of score.
//
// Bucket 0 holds the front sink, 1 the scores that are not finite, the others the rest: half of them by the score's
// place between the row's extremes, the other half by u / sqrt(1 + u^2), where u is the score's distance from the
// row's centre over its spread, both from a sample. The first keeps the resolution at range / (buckets / 2)
// everywhere, the second fills the buckets evenly when outliers stretch the range.
#pragma once
#include <cstdint>

#include "ranking_params.cuh"

namespace s2o {

constexpr int SINK_BUCKET = 0, NOT_FINITE_BUCKET = 1, FIRST_BUCKET = 2;

// What the CTA shares while it fits the map.
struct FitShared {
    float4 extremes[32];  // of each warp: least, greatest, sum and number of the sampled scores
    float root[32];
    float centre, per_spread, highest, per_range;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int s = 16; s; s /= 2) x += __shfl_xor_sync(~0u, x, s);
    return x;
}
__device__ __forceinline__ float4 warp_extremes(float4 x) {
#pragma unroll
    for (int s = 16; s; s /= 2) {
        x.x = fminf(x.x, __shfl_xor_sync(~0u, x.x, s));
        x.y = fmaxf(x.y, __shfl_xor_sync(~0u, x.y, s));
    }
    return make_float4(x.x, x.y, warp_sum(x.z), warp_sum(x.w));
}

struct ScoreRow {
    uint16_t* codes;
    const float2* ranges;
    int length, front_sink, buckets;
    float centre, per_spread, highest, per_range;

    __device__ __forceinline__ static float code_value(uint32_t word, bool high) {
        // The bits below the code are set to their middle.
        return __uint_as_float(__byte_perm(word, 0x00004080, high ? 0x5324 : 0x5104));
    }

    // Buckets of the eight scores of vector `v`.
    __device__ __forceinline__ void buckets_of(uint4 codes, float2 range, int v, uint32_t (&bucket)[8]) const {
        const float factor = fabsf(range.x) * per_spread, offset = (range.y - centre) * per_spread;
        // Each half takes `share` buckets.
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
        if (not_finite || v * 8 < front_sink) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if ((words[i / 2] >> (i % 2 * 16) & 0xffff) == SCORE_NOT_FINITE) bucket[i] = NOT_FINITE_BUCKET;
                if (v * 8 + i < front_sink) bucket[i] = SINK_BUCKET;
            }
        }
    }

    // Extremes of the row, centre and spread of a sample of one score per thread. All threads call it; they meet.
    __device__ __forceinline__ void fit(FitShared& shared) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
        const int at = min(int(threadIdx.x * __fdividef(length, blockDim.x)), length - 1);
        const uint32_t code = codes[at];
        const float2 range = ranges[at / SCORE_BLOCK];
        float4 x = make_float4(INFINITY, -INFINITY, 0, 0);
        for (int i = threadIdx.x; i < length / SCORE_BLOCK; i += blockDim.x) {
            const float2 block = ranges[i];
            const float low = fmaf(SCORE_CODE_START, fabsf(block.x), block.y);
            x.x = fminf(x.x, low);
            x.y = fmaxf(x.y, fmaf(SCORE_CODE_SPAN, fabsf(block.x), low));
        }
        const float sample = fmaf(code_value(code, false), fabsf(range.x), range.y);
        const bool counts = code != SCORE_NOT_FINITE && fabsf(sample) < INFINITY;
        if (counts) {
            x.z = sample;
            x.w = 1.f;
        }
        x = warp_extremes(x);
        if (lane == 0) shared.extremes[warp] = x;
        __syncthreads();
        if (warp == 0) {
            x = warp_extremes(lane < warps ? shared.extremes[lane] : make_float4(INFINITY, -INFINITY, 0, 0));
            const float mean = x.z / fmaxf(x.w, 1.f), span = x.y - x.x;
            const bool bounded = span > 1e-30f && span < INFINITY;
            if (lane == 0) {
                shared.extremes[0].w = x.w;
                shared.centre = fabsf(mean) < INFINITY ? mean : 0.f;
                shared.highest = bounded ? x.y : 0.f;
                shared.per_range = bounded ? 1.f / span : 0.f;
            }
        }
        __syncthreads();
        centre = shared.centre;
        highest = shared.highest;
        per_range = shared.per_range;
        const float root = warp_sum(counts ? sqrtf(fabsf(sample - centre)) : 0.f);
        if (lane == 0) shared.root[warp] = root;
        __syncthreads();
        if (warp == 0) {
            // The square of the mean root distance: a few far outliers hardly move it. 1.85 of it are 1.25 standard
            // deviations of a normal row.
            const float mean = warp_sum(lane < warps ? shared.root[lane] : 0.f) / fmaxf(shared.extremes[0].w, 1.f);
            const float per = fminf(1.f / (1.85f * mean * mean), 1e6f * per_range);
            if (lane == 0) shared.per_spread = per < INFINITY ? per : 0.f;
        }
        __syncthreads();
        per_spread = shared.per_spread;
    }
};

}  // namespace s2o
