// The stop decision of the sm_90a engine: the eight consumer warps of a query tile vote through shared memory.
//
// LAGGED: AllRows or MaxWeight, read two steps after the vote. The barriers that order the two warpgroups anyway
// (engine.cuh) have then ordered the votes too, so both make the same decision without another barrier. It costs one
// more key tile per query tile. EXACT: any rule and frame, decided before the next step at the cost of a barrier.
#pragma once
#include <cstdint>

#include "../early_stop.cuh"
#include "../online_softmax.cuh"
#include "../params.cuh"

namespace s2o {

enum class Stop { NEVER, LAGGED, EXACT };

}  // namespace s2o

namespace s2o::sm90 {

constexpr int VOTE_SLOTS = 8;
constexpr int VOTING_WARPS = 8;

// Whether all rows of each warp are below. Steps are counted across items, so that the votes of an item need not be
// read before the next item votes.
struct LaggedVotes {
    alignas(8) uint8_t warp[VOTE_SLOTS][VOTING_WARPS];

    __device__ __forceinline__ void cast(uint32_t step, int voter, bool below) {
        warp[step % VOTE_SLOTS][voter] = below;
    }
    __device__ __forceinline__ bool stops(uint32_t step) const {
        return *reinterpret_cast<const volatile uint64_t*>(warp[step % VOTE_SLOTS]) == 0x0101010101010101ull;
    }
};

// The gains of a thread's two rows. All sums are this thread's part of the row's sum.
struct RowGains {
    Gain row[2];
    bool exists[2];
};

// AllRows, MaxWeight: every row that exists gains less than tau times its mass. Written so that NaN never counts as
// below. Even lanes of a quad decide for its first row, odd lanes for its second, so the whole warp has to agree.
__device__ __forceinline__ bool rows_below(const RowGains& gains, float tau) {
    const bool odd = threadIdx.x % 2;
    const float d0 = fmaf(tau, gains.row[0].mass, -gains.row[0].gain);
    const float d1 = fmaf(tau, gains.row[1].mass, -gains.row[1].gain);
    float own = (odd ? d1 : d0) + __shfl_xor_sync(0xffffffffu, odd ? d0 : d1, 1);
    own += __shfl_xor_sync(0xffffffffu, own, 2);
    return (own > 0.f) | !(odd ? gains.exists[1] : gains.exists[0]);
}

// A sum over rows that decides under every rule. AllRows, MaxWeight: number of rows not below; MeanRatio: gain / mass;
// SumRatio: gain - tau * mass.
struct StopVote {
    float sum;
    float rows;

    // The vote of this warp's 16 rows.
    __device__ __forceinline__ static StopVote of(const RowGains& gains, int rule, float tau) {
        StopVote vote = {0.f, 0.f};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float gain = quad_sum(gains.row[h].gain), mass = quad_sum(gains.row[h].mass);
            const float value = rule == MEAN_RATIO  ? gain / mass
                                : rule == SUM_RATIO ? fmaf(-tau, mass, gain)
                                                    : (gain < tau * mass ? 0.f : 1.f);
            if (gains.exists[h]) {
                vote.sum += value;
                vote.rows += 1.f;
            }
        }
        // Sums over one lane of each quad.
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
            vote.sum += __shfl_xor_sync(0xffffffffu, vote.sum, lanes);
            vote.rows += __shfl_xor_sync(0xffffffffu, vote.rows, lanes);
        }
        return vote;
    }
};

// One vote per warp. A slot is reused two decisions later, counted across items: every warp has then passed another
// barrier, and so has read the slot.
struct ExactVotes {
    StopVote warp[2][VOTING_WARPS];

    // Every thread adds the same numbers in the same order. Negated comparisons would count NaN as below.
    __device__ __forceinline__ bool stops(int slot, int rule, float tau) const {
        float sum = 0.f, rows = 0.f;
        for (int i = 0; i < VOTING_WARPS; ++i) {
            const volatile StopVote& vote = warp[slot][i];
            sum += vote.sum;
            rows += vote.rows;
        }
        if (rule == MEAN_RATIO) return sum < tau * rows;
        return rule == SUM_RATIO ? sum < 0.f : sum == 0.f;
    }
};

}  // namespace s2o::sm90
