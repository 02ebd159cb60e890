// What a consumer's rows vote on a key tile, and the exact decision.
#pragma once
#include "stop_vote.cuh"
#include "store.cuh"

namespace s2o::sm90 {

// What a key tile does to the two rows of a thread. All lanes of a quad have the same maxima, except in steps whose maxima
// lag.
struct TileEffect {
    float old_sum[2], rescale[2], tile_sum[2], tile_max[2];
};

__device__ __forceinline__ RowGains gains_of(const S2oParams& p, const OutputRows& rows, const OnlineSoftmax& softmax,
                                             const TileEffect& tile, float scale_log2) {
    RowGains gains;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float old_sum = tile.old_sum[h], tile_sum = tile.tile_sum[h], rescale = tile.rescale[h];
        if (p.stop_rule >= MAX_WEIGHT) {
            // A quarter for each lane of the quad.
            const float largest = 0.25f * exp2_approx((tile.tile_max[h] - softmax.row_max[h]) * scale_log2);
            gains.row[h] = Gain::of_largest(old_sum, largest, tile_sum, rescale, p.stop_rule);
        } else {
            gains.row[h] = Gain::of(old_sum, softmax.row_sum[h], tile_sum, rescale, p.literal_frame);
        }
        gains.exists[h] = rows.exists[h];
    }
    return gains;
}

// The vote of the warp's rows on a tile, whose maxima are those of this thread. Even lanes of a quad take its first row, odd
// lanes its second.
template <Stop STOP>
__device__ __forceinline__ uint32_t lagged_vote(const OutputRows& rows, const OnlineSoftmax& softmax, const TileEffect& tile,
                                                float scale_log2, float tau) {
    const int h = threadIdx.x % 2;
    const bool exists = h ? rows.exists[1] : rows.exists[0];
    if constexpr (STOP == Stop::LAGGED_GAINS) {
        const float excess = sum_of_row(fmaf(-tau, tile.old_sum[0] * tile.rescale[0], tile.tile_sum[0]),
                                        fmaf(-tau, tile.old_sum[1] * tile.rescale[1], tile.tile_sum[1]));
        return __any_sync(0xffffffffu, exists && !(excess < 0.f));
    }
    auto of_row = [&](const float(&x)[2]) { return h ? x[1] : x[0]; };
    // A score that is not a number makes only the tile's sum NaN.
    const float mass = sum_of_row(fmaf(tile.old_sum[0], tile.rescale[0], 0.f * tile.tile_sum[0]),
                                  fmaf(tile.old_sum[1], tile.rescale[1], 0.f * tile.tile_sum[1]));
    const float largest = max_of_row(tile.tile_max[0], tile.tile_max[1]);
    const float weight = exp2_approx((largest - of_row(softmax.row_max)) * scale_log2);
    return __float_as_uint(warp_max_or_nan(exists ? weight * reciprocal(mass) : 0.f));
}

template <class X>
__device__ __forceinline__ auto decisions_of(const typename X::Params& p, const WorkItem& w) {
    if constexpr (X::STOP == Stop::LAGGED_WEIGHTS) {
        return WeightDecisions(p, w.gather_from, w.steps - w.gather_from);
    } else {
        return 0;
    }
}

// Whether the item ends with this step under the exact rule. Contains a barrier of all consumers. A discarded tile
// leaves the mass unchanged.
__device__ __forceinline__ bool stops_exactly(const S2oParams& p, ExactVotes& votes, const OutputRows& rows,
                                              OnlineSoftmax& softmax, const TileEffect& tile, float scale_log2, int& slot,
                                              MeanWeight& weights, int judged, int tiles) {
    slot ^= 1;
    const RowGains gains = gains_of(p, rows, softmax, tile, scale_log2);
    const StopVote vote = StopVote::of(gains, p.stop_rule, p.tau);
    if (threadIdx.x % 32 == 0) votes.warp[slot][threadIdx.x / 32 - WARPGROUP / 32] = vote;
    named_barrier_sync(DECISION, CONSUMERS * WARPGROUP);
    const bool stops = p.tau > 0.f && votes.stops(slot, p.stop_rule, p.tau, weights, judged, tiles);
    if (stops && p.discard) {
#pragma unroll
        for (int h = 0; h < 2; ++h) softmax.row_sum[h] = tile.old_sum[h] * tile.rescale[h];
    }
    return stops;
}

}  // namespace s2o::sm90
