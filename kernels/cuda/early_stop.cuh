// The stop decision of a query tile, as crates/s2o-core/src/early_stop.rs: is the gain of a key tile below tau times
// the mass so far? The gain of a row is written here once; how the rows of a tile vote (StopVote) depends on the
// engine: sm90/stop_vote.cuh, sm80/stop_vote.cuh.
#pragma once

namespace s2o {

// Gain of a key tile for one row, and the mass it is compared with, in one frame.
struct Gain {
    float gain, mass;

    // Of the mass `old_sum` before the tile, relative to the maximum before it, and `new_sum` and `tile_sum` after it,
    // relative to the maximum after it; `rescale` converts from the first frame to the second.
    __device__ __forceinline__ static Gain of(float old_sum, float new_sum, float tile_sum, float rescale,
                                              bool literal_frame) {
        return {literal_frame ? new_sum - old_sum : tile_sum, literal_frame ? old_sum : old_sum * rescale};
    }
};

}  // namespace s2o
