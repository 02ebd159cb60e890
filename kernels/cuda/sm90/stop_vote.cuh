// The stop decision of the sm_90a engine: the eight consumer warps of a query tile vote through shared memory.
//
// LAGGED: AllRows, MaxWeight or MeanWeight, read two steps after the vote. The barriers that order the two warpgroups anyway
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

// The largest gain over mass in any row of each warp. Steps are counted across items, so that the votes of an item need not
// be read before the next item votes.
struct LaggedVotes {
    alignas(16) float warp[VOTE_SLOTS][VOTING_WARPS];

    __device__ __forceinline__ void cast(uint32_t step, int voter, float largest) {
        warp[step % VOTE_SLOTS][voter] = largest;
    }
    __device__ __forceinline__ float largest(uint32_t step) const {
        const volatile uint4* votes = reinterpret_cast<const volatile uint4*>(warp[step % VOTE_SLOTS]);
        uint32_t largest = 0;  // as max_or_nan
#pragma unroll
        for (int i = 0; i < VOTING_WARPS / 4; ++i) {
            largest = max(max(largest, max(votes[i].x, votes[i].y)), max(votes[i].z, votes[i].w));
        }
        return __uint_as_float(largest);
    }
};

// The gains of a thread's two rows. All sums are this thread's part of the row's sum.
struct RowGains {
    Gain row[2];
    bool exists[2];
};

// The largest gain over mass of the warp's rows, or NaN. Even lanes of a quad divide for its first row, odd lanes for its
// second.
__device__ __forceinline__ float largest_ratio(const RowGains& gains) {
    const bool odd = threadIdx.x % 2;
    auto row_sum = [&](float first, float second) {
        const float pair = (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
    };
    const float gain = row_sum(gains.row[0].gain, gains.row[1].gain);
    const float mass = row_sum(gains.row[0].mass, gains.row[1].mass);
    return warp_max_or_nan((odd ? gains.exists[1] : gains.exists[0]) ? __fdividef(gain, mass) : 0.f);
}

// What decides under every rule. AllRows, MaxWeight: number of rows not below; MeanRatio: sum of gain / mass; SumRatio: sum
// of gain - tau * mass; MeanWeight: the largest gain / mass, or NaN.
struct StopVote {
    float sum;
    float rows;

    // The vote of this warp's 16 rows.
    __device__ __forceinline__ static StopVote of(const RowGains& gains, int rule, float tau) {
        if (rule == MEAN_WEIGHT) return {largest_ratio(gains), 1.f};
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

    // After key tile `judged`, counted from 1, of `tiles`. Every thread adds the same numbers in the same order. Negated
    // comparisons would count NaN as below.
    __device__ __forceinline__ bool stops(int slot, int rule, float tau, MeanWeight& weights, int judged, int tiles) const {
        float sum = 0.f, rows = 0.f, largest = 0.f;
        for (int i = 0; i < VOTING_WARPS; ++i) {
            const volatile StopVote& vote = warp[slot][i];
            sum += vote.sum;
            rows += vote.rows;
            if (rule == MEAN_WEIGHT) largest = max_or_nan(largest, vote.sum);
        }
        if (rule == MEAN_WEIGHT) return weights.stops(largest, judged, tiles, tau);
        if (rule == MEAN_RATIO) return sum < tau * rows;
        return rule == SUM_RATIO ? sum < 0.f : sum == 0.f;
    }
};

}  // namespace s2o::sm90
