// The stop decision of a query tile, as in crates/s2o-core/src/early_stop.rs, taken before the next key tile.
//
// Every warp writes a pair of numbers to shared memory. After a barrier that the ring needs anyway, every thread adds
// the pairs in the same order, so that all threads of a block, and two runs, make the same decision.
#pragma once
#include "../early_stop.cuh"
#include "../online_softmax.cuh"
#include "traits.cuh"

namespace s2o::sm80 {

// A thread shares four rows, 2m + h, with the three other lanes of its quad. Values needed once per key tile are kept
// by one lane, row lane % 4 by each lane: one register and one exponential instead of four.
__device__ __forceinline__ float own_row(float r0, float r1, float r2, float r3) {
    const int thread = thread_index();
    const float low = thread & 1 ? r1 : r0, high = thread & 1 ? r3 : r2;
    return thread & 2 ? high : low;
}
// The quad's sum of the own row.
__device__ __forceinline__ float own_row_sum(float r0, float r1, float r2, float r3) {
    const int thread = thread_index();
    const bool odd = thread & 1, high = thread & 2;
    const float low_pair = (odd ? r1 : r0) + __shfl_xor_sync(0xffffffffu, odd ? r0 : r1, 1);
    const float high_pair = (odd ? r3 : r2) + __shfl_xor_sync(0xffffffffu, odd ? r2 : r3, 1);
    return (high ? high_pair : low_pair) + __shfl_xor_sync(0xffffffffu, high ? low_pair : high_pair, 2);
}
// Broadcasts the value of each row's lane, row 2m + h, to the whole quad.
__device__ __forceinline__ void to_quad(float own, float (&rows)[2][2]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) rows[r / 2][r % 2] = __shfl_sync(0xffffffffu, own, r, 4);
}
__device__ __forceinline__ int own_row_index() {
    const int thread = thread_index();
    return thread / 32 * WARP_ROWS + thread % 4 * 8 + thread % 32 / 4;
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

    __device__ __forceinline__ static float new_max(const OnlineSoftmax (&softmax)[2]) {
        return own_row(softmax[0].row_max[0], softmax[0].row_max[1], softmax[1].row_max[0], softmax[1].row_max[1]);
    }
    __device__ __forceinline__ RowUpdate preview(const OnlineSoftmax (&softmax)[2], float scale_log2) const {
        return {
            new_max(softmax), exp2_approx((row_max - new_max(softmax)) * scale_log2),
            own_row_sum(softmax[0].row_sum[0], softmax[0].row_sum[1], softmax[1].row_sum[0], softmax[1].row_sum[1])};
    }
    __device__ __forceinline__ void add(const RowUpdate& update) {
        row_sum = fmaf(row_sum, update.rescale, update.tile_sum);
        row_max = update.new_max;
    }
};

__device__ __forceinline__ void cast_vote(const S2oParams& p, const WorkItem& w, const OwnRow& before,
                                          const RowUpdate& update, Control& control, float scale_log2) {
    Gain own = Gain::of(before.row_sum, before.row_sum * update.rescale + update.tile_sum, update.tile_sum,
                        update.rescale, p.literal_frame);
    if (p.stop_rule == MAX_WEIGHT) {
        const float largest = exp2_approx((control.max_or_gain[thread_index()] - update.new_max) * scale_log2);
        own = Gain::of_largest(before.row_sum, largest, update.tile_sum, update.rescale);
    }
    const int row = w.q_start + own_row_index();
    const bool exists = row >= 0 && row < w.row_end;
    StopVote vote = make_float2(0.f, 0.f);
    if (p.stop_rule == ALL_ROWS || p.stop_rule == MAX_WEIGHT) {
        // Written so that NaN never counts as below.
        vote.x = __all_sync(0xffffffffu, !exists || own.gain < p.tau * own.mass) ? 1.f : 0.f;
    } else {
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

__device__ __forceinline__ bool stops(const S2oParams& p, const StopVote (&votes)[WARPS]) {
    StopVote all = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        all.x += votes[i].x;
        all.y += votes[i].y;
    }
    const bool counts_warps = p.stop_rule == ALL_ROWS || p.stop_rule == MAX_WEIGHT;
    return p.tau > 0.f && (counts_warps ? all.x == WARPS : all.x < p.tau * all.y);
}

}  // namespace s2o::sm80
