// The stop decision of a query tile, as in crates/s2o-core/src/early_stop.rs: stop if the gain of a key tile is below
// tau times the mass so far. The vote of a tile's rows (StopVote) is in sm90/stop_vote.cuh and sm80/stop_vote.cuh.
#pragma once

namespace s2o {

// Gain of a key tile for one row, and the mass to compare it with.
struct Gain {
    float gain, mass;

    // `old_sum`, the mass before the tile, is relative to the maximum before the tile. `new_sum` and `tile_sum` are
    // relative to the maximum after it. `rescale` converts from the first frame to the second.
    __device__ __forceinline__ static Gain of(float old_sum, float new_sum, float tile_sum, float rescale,
                                              bool literal_frame) {
        return {literal_frame ? new_sum - old_sum : tile_sum, literal_frame ? old_sum : old_sum * rescale};
    }
};

}  // namespace s2o
