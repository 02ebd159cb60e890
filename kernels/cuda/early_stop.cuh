// The stop decision of a query tile, as crates/s2o-core/src/early_stop.rs: is the gain of a key tile too small for the mass
// so far? The eight consumer warps of a tile vote through shared memory.
//
// LAGGED: AllRows, read two steps after it was cast. The two warpgroups are then ordered by what they do anyway, see
// the sm_90 engine, and decide alike without another barrier. The price is one more tile per query tile.
// EXACT: any rule and frame, decided before the next step at the price of a barrier.
#pragma once
#include <cstdint>

#include "online_softmax.cuh"
#include "params.cuh"

namespace s2o {

enum class Stop { NEVER, LAGGED, EXACT };

constexpr int VOTE_SLOTS = 8;
constexpr int VOTING_WARPS = 8;

// One byte for each warp. Steps are counted across items, so that the votes of one need not be read before the next casts
// its own.
struct LaggedVotes {
    alignas(8) uint8_t warp[VOTE_SLOTS][VOTING_WARPS];

    __device__ __forceinline__ void cast(uint32_t step, int voter, bool below) {
        warp[step % VOTE_SLOTS][voter] = below;
    }
    __device__ __forceinline__ bool all(uint32_t step) const {
        return *reinterpret_cast<const volatile uint64_t*>(warp[step % VOTE_SLOTS]) == 0x0101010101010101ull;
    }
};

// What a thread knows of its two rows after a key tile; sums are this thread's share of the row's.
struct RowGains {
    float gain[2];
    float mass[2];  // before the tile, in the frame of the gain
    bool exists[2];
};

// AllRows: every row that exists gains less than tau times its mass. Written so that NaN never counts as below. Even lanes
// of a quad speak for its first row, odd ones for its second: the whole warp has to agree.
__device__ __forceinline__ bool rows_below(const RowGains& r, float tau) {
    const bool odd = threadIdx.x % 2;
    const float d0 = fmaf(tau, r.mass[0], -r.gain[0]), d1 = fmaf(tau, r.mass[1], -r.gain[1]);
    float own = (odd ? d1 : d0) + __shfl_xor_sync(0xffffffffu, odd ? d0 : d1, 1);
    own += __shfl_xor_sync(0xffffffffu, own, 2);
    return (own > 0.f) | !(odd ? r.exists[1] : r.exists[0]);
}

// A warp's share of a decision that is a sum: what it adds to the vote, and how many rows it speaks for.
struct VoteShare {
    float value;
    float rows;
};

// One share for each warp. A slot is reused two decisions later, counted across items: every warp has then met the others
// once more, and so has read the slot.
struct ExactVotes {
    VoteShare warp[2][VOTING_WARPS];

    // The same for every thread: a fixed order of the same numbers. Negated comparisons would take NaN for below.
    __device__ __forceinline__ bool below(int slot, int rule, float tau) const {
        float value = 0.f, rows = 0.f;
        for (int i = 0; i < VOTING_WARPS; ++i) {
            const volatile VoteShare& share = warp[slot][i];
            value += share.value;
            rows += share.rows;
        }
        if (rule == ALL_ROWS) return value == 0.f;
        if (rule == MEAN_RATIO) return value < tau * rows;
        return value < 0.f;
    }
};

// The share of this warp's 16 rows under `rule`: rows that are not below; sum of gain / mass; sum of gain - tau mass.
__device__ __forceinline__ VoteShare vote_share(const RowGains& r, int rule, float tau) {
    VoteShare share = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float gain = quad_sum(r.gain[h]), mass = quad_sum(r.mass[h]);
        const float value = rule == ALL_ROWS     ? (gain < tau * mass ? 0.f : 1.f)
                            : rule == MEAN_RATIO ? gain / mass
                                                 : fmaf(-tau, mass, gain);
        if (r.exists[h]) {
            share.value += value;
            share.rows += 1.f;
        }
    }
    // One lane of each quad speaks for its rows.
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        share.value += __shfl_xor_sync(0xffffffffu, share.value, lanes);
        share.rows += __shfl_xor_sync(0xffffffffu, share.rows, lanes);
    }
    return share;
}

}  // namespace s2o
