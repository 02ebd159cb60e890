// The stop decision of a query tile, as in crates/s2o-core/src/early_stop.rs: stop if the gain of a key tile, or three
// times its largest weight, is below tau times the mass so far. The vote of a tile's rows (StopVote) is in
// sm90/stop_vote.cuh and sm80/stop_vote.cuh.
#pragma once

namespace s2o {

// 1 / WEIGHT_SHARE of `StopRule`.
constexpr float MAX_WEIGHT_FACTOR = 3.f;

// Gain of a key tile for one row, and the mass to compare it with.
struct Gain {
    float gain, mass;

    // `old_sum`, the mass before the tile, is relative to the maximum before the tile. `new_sum` and `tile_sum` are
    // relative to the maximum after it. `rescale` converts from the first frame to the second.
    __device__ __forceinline__ static Gain of(float old_sum, float new_sum, float tile_sum, float rescale,
                                              bool literal_frame) {
        return {literal_frame ? new_sum - old_sum : tile_sum, literal_frame ? old_sum : old_sum * rescale};
    }

    // For MAX_WEIGHT: `largest` is the weight of a key. A score that is not a number makes only the sum NaN.
    __device__ __forceinline__ static Gain of_largest(float old_sum, float largest, float tile_sum, float rescale) {
        return {fmaf(0.f, tile_sum, MAX_WEIGHT_FACTOR * largest), old_sum * rescale};
    }
};

}  // namespace s2o
