// The stop decision of a query tile, as in crates/s2o-core/src/early_stop.rs, taken before the next key tile.
//
// Every warp writes a pair of numbers to shared memory. After a barrier that the ring needs anyway, every thread adds
// the pairs in the same order, so that all threads of a block, and two runs, make the same decision.
#pragma once
#include "../early_stop.cuh"
#include "../online_softmax.cuh"
#include "traits.cuh"

namespace s2o::sm80 {

// A thread shares the rows of its fragments, row 2m + h, with the three other lanes of its quad. Values needed once per
// key tile are kept by one lane for each row, the own row: one register and one exponential instead of four. With one
// fragment two lanes own the same row.
__device__ __forceinline__ float own_row(const float (&rows)[2][2]) {
    const int thread = thread_index();
    const float low = thread & 1 ? rows[0][1] : rows[0][0], high = thread & 1 ? rows[1][1] : rows[1][0];
    return thread & 2 ? high : low;
}
__device__ __forceinline__ float own_row(const float (&rows)[1][2]) {
    return thread_index() & 1 ? rows[0][1] : rows[0][0];
}
// The quad's sum of the own row.
__device__ __forceinline__ float own_row_sum(const float (&rows)[2][2]) {
    const int thread = thread_index();
    const bool odd = thread & 1, high = thread & 2;
    const float low_pair = (odd ? rows[0][1] : rows[0][0]) +
                           __shfl_xor_sync(0xffffffffu, odd ? rows[0][0] : rows[0][1], 1);
    const float high_pair = (odd ? rows[1][1] : rows[1][0]) +
                            __shfl_xor_sync(0xffffffffu, odd ? rows[1][0] : rows[1][1], 1);
    return (high ? high_pair : low_pair) + __shfl_xor_sync(0xffffffffu, high ? low_pair : high_pair, 2);
}
__device__ __forceinline__ float own_row_sum(const float (&rows)[1][2]) {
    const bool odd = thread_index() & 1;
    const float pair = (odd ? rows[0][1] : rows[0][0]) +
                       __shfl_xor_sync(0xffffffffu, odd ? rows[0][0] : rows[0][1], 1);
    return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
}
// Broadcasts the value of each row's lane, row 2m + h, to the whole quad.
template <int M>
__device__ __forceinline__ void to_quad(float own, float (&rows)[M][2]) {
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) rows[r / 2][r % 2] = __shfl_sync(0xffffffffu, own, r, 4);
}
template <class X>
__device__ __forceinline__ int own_row_index() {
    const int thread = thread_index();
    return thread / 32 * X::WARP_ROWS + thread % (2 * X::FRAGMENTS) * 8 + thread % 32 / 4;
}

// The effect of a key tile on the own row.
struct RowUpdate {
    float new_max;
    float rescale;  // of the mass before the tile
    float tile_sum;
};

// The own row before the current key tile; the tile's mass is only in OnlineSoftmax::row_sum.
struct OwnRow {
    float row_max, row_sum;

    template <int M>
    __device__ __forceinline__ RowUpdate preview(const OnlineSoftmax (&softmax)[M], float scale_log2) const {
        float maxima[M][2], sums[M][2];
#pragma unroll
        for (int r = 0; r < 2 * M; ++r) {
            maxima[r / 2][r % 2] = softmax[r / 2].row_max[r % 2];
            sums[r / 2][r % 2] = softmax[r / 2].row_sum[r % 2];
        }
        const float new_max = own_row(maxima);
        return {new_max, exp2_approx((row_max - new_max) * scale_log2), own_row_sum(sums)};
    }
    __device__ __forceinline__ void add(const RowUpdate& update) {
        row_sum = fmaf(row_sum, update.rescale, update.tile_sum);
        row_max = update.new_max;
    }
};

template <class X>
__device__ __forceinline__ void cast_vote(const S2oParams& p, const WorkItem& w, const OwnRow& before,
                                          const RowUpdate& update, Control<X>& control, float scale_log2) {
    Gain own = Gain::of(before.row_sum, before.row_sum * update.rescale + update.tile_sum, update.tile_sum,
                        update.rescale, p.literal_frame);
    if (p.stop_rule >= MAX_WEIGHT) {
        const float largest = exp2_approx((control.tile_max[thread_index()] - update.new_max) * scale_log2);
        own = Gain::of_largest(before.row_sum, largest, update.tile_sum, update.rescale, p.stop_rule);
    }
    const int row = w.q_start + own_row_index<X>();
    const bool exists = row >= 0 && row < w.row_end;
    StopVote vote = make_float2(0.f, 0.f);
    if (p.stop_rule == MEAN_WEIGHT) {
        vote.x = warp_max_or_nan(exists ? __fdividef(own.gain, own.mass) : 0.f);
    } else if (p.stop_rule == ALL_ROWS || p.stop_rule == MAX_WEIGHT) {
        // Written so that NaN never counts as below.
        vote.x = __all_sync(0xffffffffu, !exists || own.gain < p.tau * own.mass) ? 1.f : 0.f;
    } else {
        // Rows that two lanes own count twice in both sums.
        if (exists) {
            vote = p.stop_rule == MEAN_RATIO ? make_float2(own.gain / own.mass, 1.f) : make_float2(own.gain, own.mass);
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            vote.x += __shfl_xor_sync(0xffffffffu, vote.x, lanes);
            vote.y += __shfl_xor_sync(0xffffffffu, vote.y, lanes);
        }
    }
    const int thread = thread_index();
    if (thread % 32 == 0) control.votes[thread / 32] = vote;
}

// After key tile `judged`, counted from 1, of `tiles`.
template <int WARPS>
__device__ __forceinline__ bool stops(const S2oParams& p, const StopVote (&votes)[WARPS], MeanWeight& weights, int judged,
                                      int tiles) {
    StopVote all = make_float2(0.f, 0.f);
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        all.x += votes[i].x;
        all.y += votes[i].y;
        if (p.stop_rule == MEAN_WEIGHT) largest = max_or_nan(largest, votes[i].x);
    }
    if (p.stop_rule == MEAN_WEIGHT) return weights.stops(largest, judged, tiles, p.tau);
    const bool counts_warps = p.stop_rule == ALL_ROWS || p.stop_rule == MAX_WEIGHT;
    return p.tau > 0.f && (counts_warps ? all.x == WARPS : all.x < p.tau * all.y);
}

}  // namespace s2o::sm80
