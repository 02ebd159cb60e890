// The stop decision of a query tile, as crates/s2o/src/early_stop.rs: is the gain of a key tile below tau times the
// mass so far, both in the frame of the new maximum?
//
// Votes are read two steps after they were cast (see engine_sm90.cuh): both consumer warpgroups then see all of them
// without another barrier, and decide alike. The price is one more tile per query tile.
#pragma once
#include <cstdint>

#include "online_softmax.cuh"

namespace s2o {

constexpr int VOTE_SLOTS = 4;

// One byte for each of the 8 consumer warps; a slot is reused four steps later.
struct StopVotes {
    alignas(8) uint8_t warp[VOTE_SLOTS][8];

    __device__ __forceinline__ bool all(int step) const {
        return *reinterpret_cast<const volatile uint64_t*>(warp[step % VOTE_SLOTS]) == 0x0101010101010101ull;
    }
};

// AllRows: every row that exists gains less than tau times its mass. `mass` is this thread's share before the tile,
// already rescaled. Written so that NaN never counts as below.
__device__ __forceinline__ bool rows_below(const float (&gain)[2], const float (&mass)[2], const bool (&exists)[2],
                                           float tau) {
    const float d0 = quad_sum(fmaf(tau, mass[0], -gain[0]));
    const float d1 = quad_sum(fmaf(tau, mass[1], -gain[1]));
    return (d0 > 0.f | !exists[0]) & (d1 > 0.f | !exists[1]);
}

}  // namespace s2o
