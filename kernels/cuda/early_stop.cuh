// The stop decision of a query tile, as in crates/s2o-core/src/early_stop.rs. The votes of a tile's rows (StopVote) are in
// sm90/stop_vote.cuh and sm80/stop_vote.cuh.
#pragma once
#include "params.cuh"

namespace s2o {

// 1 / WEIGHT_SHARE and RECENCY of `StopRule`.
constexpr float MAX_WEIGHT_FACTOR = 3.f;
constexpr float RECENCY = 5.f;

// Gain of a key tile for one row, and the mass to compare it with.
struct Gain {
    float gain, mass;

    // `old_sum`, the mass before the tile, is relative to the maximum before the tile. `new_sum` and `tile_sum` are
    // relative to the maximum after it. `rescale` converts from the first frame to the second.
    __device__ __forceinline__ static Gain of(float old_sum, float new_sum, float tile_sum, float rescale,
                                              bool literal_frame) {
        return {literal_frame ? new_sum - old_sum : tile_sum, literal_frame ? old_sum : old_sum * rescale};
    }

    // For MAX_WEIGHT and MEAN_WEIGHT: `largest` is the weight of a key. A score that is not a number makes only the sum NaN.
    __device__ __forceinline__ static Gain of_largest(float old_sum, float largest, float tile_sum, float rescale,
                                                      int rule) {
        return {fmaf(0.f, tile_sum, rule == MAX_WEIGHT ? MAX_WEIGHT_FACTOR * largest : largest), old_sum * rescale};
    }
};

// Approximate.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The larger one of two numbers that are not negative, or NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}
// Of the numbers of the warp's lanes.
__device__ __forceinline__ float warp_max_or_nan(float x) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// The decisions of MEAN_WEIGHT about the key tiles of one query tile.
struct MeanWeight {
    float mean = 0.f;

    // After key tile `judged`, counted from 1, of `tiles`. `largest` is the largest weight of a key in any row. NaN stays.
    __device__ __forceinline__ bool stops(float largest, int judged, int tiles, float tau) {
        mean += ((largest > 1.f ? 1.f : largest) - mean) * fminf(1.f, __fdividef(RECENCY, float(judged)));
        return mean * float(tiles - judged + 1) < tau * float(tiles);
    }
};

}  // namespace s2o
