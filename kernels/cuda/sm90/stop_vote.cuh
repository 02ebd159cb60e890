// The stop decision of the sm_90a engine: the eight consumer warps of a query tile vote through shared memory.
//
// LAGGED_GAINS is AllRows, LAGGED_WEIGHTS MaxWeight or MeanWeight, read two steps after the vote. The barriers that order the
// two warpgroups anyway (engine.cuh) have then ordered the votes too, so both make the same decision without another barrier.
// It costs one more key tile per query tile. The instructions of vote and decision are on the path of every step, so each
// kernel has those of its rules alone. EXACT: any rule and frame, decided before the next step at the cost of a barrier.
#pragma once
#include <cstdint>

#include "../early_stop.cuh"
#include "../online_softmax.cuh"
#include "../params.cuh"

namespace s2o {

enum class Stop { NEVER, LAGGED_GAINS, LAGGED_WEIGHTS, EXACT };

}  // namespace s2o

namespace s2o::sm90 {

constexpr int VOTE_SLOTS = 8;
constexpr int VOTING_WARPS = 8;

// The votes of all warps on a tile.
struct Votes {
    uint32_t warp[VOTING_WARPS];
    __device__ __forceinline__ uint32_t largest() const {
        uint32_t largest = warp[0];
#pragma unroll
        for (int i = 1; i < VOTING_WARPS; ++i) largest = max(largest, warp[i]);
        return largest;
    }
};

// LAGGED_GAINS: 1 if a row of the warp must go on, otherwise 0. LAGGED_WEIGHTS: the bits of the largest weight of a key over
// mass in any row of the warp. Those of floats that are not negative have their order, and those of NaN are above. Steps are
// counted across items, so that the votes of an item need not be read before the next item votes.
struct LaggedVotes {
    alignas(16) uint32_t warp[VOTE_SLOTS][VOTING_WARPS];

    __device__ __forceinline__ void cast(uint32_t step, int voter, uint32_t vote) { warp[step % VOTE_SLOTS][voter] = vote; }
    // Computed where it is called, and not where it is used.
    __device__ __forceinline__ uint32_t address(uint32_t step) const {
        uint32_t address = smem_address(warp[step % VOTE_SLOTS]);
        asm volatile("" : "+r"(address));
        return address;
    }
    __device__ __forceinline__ static Votes read(uint32_t address) {
        static_assert(VOTING_WARPS == 8);
        Votes votes;
        uint32_t(&w)[VOTING_WARPS] = votes.warp;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(address));
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + 16];"
                     : "=r"(w[4]), "=r"(w[5]), "=r"(w[6]), "=r"(w[7])
                     : "r"(address));
        return votes;
    }
};

// The decisions of LAGGED_WEIGHTS about an item. What does not depend on the votes is ready before them.
struct WeightDecisions {
    bool is_mean;
    float mean = 0.f, limit;
    float judged;  // number of the tile that the next decision is about, counted from 1
    float left;    // the share of the prefix that is left after it, times the tiles for MEAN_WEIGHT

    // `tiles` follow `before` steps whose tiles are not judged.
    __device__ __forceinline__ WeightDecisions(const S2oParams& p, int before, int tiles)
        : is_mean(p.stop_rule == MEAN_WEIGHT),
          limit(is_mean ? p.tau * float(tiles) : p.tau * (1.f / MAX_WEIGHT_FACTOR)),
          judged(float(-before)),
          left(is_mean ? float(tiles + 1 + before) : 1.f) {}

    // Also before the first tile, with any `largest`. NaN does not stop.
    __device__ __forceinline__ bool stops(uint32_t largest) {
        const float weight = __uint_as_float(largest) > 1.f ? 1.f : __uint_as_float(largest);
        const float rate = fminf(1.f, RECENCY * reciprocal(judged));
        const bool counts = judged > 0.f;
        mean = counts ? (is_mean ? fmaf(weight - mean, rate, mean) : weight) : 0.f;
        const bool below = counts && mean * left < limit;
        judged += 1.f;
        left -= is_mean ? 1.f : 0.f;
        return below;
    }
};

// The gains of a thread's two rows. All sums are this thread's part of the row's sum.
struct RowGains {
    Gain row[2];
    bool exists[2];
};

// The quad's sum for its first row in even lanes, and for its second in odd ones.
__device__ __forceinline__ float sum_of_row(float first, float second) {
    const bool odd = threadIdx.x % 2;
    const float pair = (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
    return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
}

// Likewise the maximum. Skips NaN.
__device__ __forceinline__ float max_of_row(float first, float second) {
    const bool odd = threadIdx.x % 2;
    const float pair = fmaxf(odd ? second : first, __shfl_xor_sync(0xffffffffu, odd ? first : second, 1));
    return fmaxf(pair, __shfl_xor_sync(0xffffffffu, pair, 2));
}

// The largest gain over mass of the warp's rows, or NaN.
__device__ __forceinline__ float largest_ratio(const RowGains& gains) {
    const float gain = sum_of_row(gains.row[0].gain, gains.row[1].gain);
    const float mass = sum_of_row(gains.row[0].mass, gains.row[1].mass);
    return warp_max_or_nan(gains.exists[threadIdx.x % 2] ? __fdividef(gain, mass) : 0.f);
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
