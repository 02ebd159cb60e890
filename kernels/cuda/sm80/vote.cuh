// The stop decision of a query tile, as crates/s2o-core/src/early_stop.rs, taken before the next key tile.
//
// Every warp casts a pair of numbers into shared memory; after a barrier that the ring needs anyway every thread adds the
// pairs up in one order. So all threads of a block decide alike, and two runs too.
#pragma once
#include "../online_softmax.cuh"
#include "traits.cuh"

namespace s2o::sm80 {

// A thread shares four rows, 2m + h, with the three other lanes of its quad. What is needed once a key tile is kept by one
// lane for all, row lane % 4 by each: one register instead of four, one exponential instead of four.
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
// What the lane of row 2m + h has, to the whole quad.
__device__ __forceinline__ void to_quad(float own, float (&rows)[2][2]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) rows[r / 2][r % 2] = __shfl_sync(0xffffffffu, own, r, 4);
}
__device__ __forceinline__ int own_row_index() {
    const int thread = thread_index();
    return thread / 32 * WARP_ROWS + thread % 4 * 8 + thread % 32 / 4;
}

// What a key tile does to the own row.
struct TileGain {
    float row_max;  // now
    float rescale;  // of what was before
    float gain;
};

// The own row before the current key tile, whose mass is in OnlineSoftmax::row_sum alone.
struct Committed {
    float row_max, row_sum;

    __device__ __forceinline__ static float max_now(const OnlineSoftmax (&softmax)[2]) {
        return own_row(softmax[0].row_max[0], softmax[0].row_max[1], softmax[1].row_max[0], softmax[1].row_max[1]);
    }
    __device__ __forceinline__ float rescale(const OnlineSoftmax (&softmax)[2], float scale_log2) const {
        return exp2_approx((row_max - max_now(softmax)) * scale_log2);
    }
    __device__ __forceinline__ TileGain tile(const OnlineSoftmax (&softmax)[2], float scale_log2) const {
        return {max_now(softmax), rescale(softmax, scale_log2),
                own_row_sum(softmax[0].row_sum[0], softmax[0].row_sum[1], softmax[1].row_sum[0], softmax[1].row_sum[1])};
    }
    __device__ __forceinline__ void commit(const TileGain& tile) {
        row_sum = fmaf(row_sum, tile.rescale, tile.gain);
        row_max = tile.row_max;
    }
};

__device__ __forceinline__ void cast_vote(const SparseParams& p, const WorkItem& w, const Committed& before,
                                          const TileGain& tile, float2 (&votes)[WARPS]) {
    float gain = tile.gain, mass = before.row_sum * tile.rescale;
    if (p.literal_frame) {
        gain = mass + gain - before.row_sum;
        mass = before.row_sum;
    }
    const int row = w.q_start + own_row_index();
    const bool exists = row >= 0 && row < w.row_end;
    float2 sums = make_float2(0.f, 0.f);
    if (p.stop_rule == ALL_ROWS) {
        // Written so that NaN never counts as below.
        sums.x = __all_sync(0xffffffffu, !exists || gain < p.tau * mass) ? 1.f : 0.f;
    } else {
        if (exists) sums = p.stop_rule == MEAN_RATIO ? make_float2(gain / mass, 1.f) : make_float2(gain, mass);
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            sums.x += __shfl_xor_sync(0xffffffffu, sums.x, lanes);
            sums.y += __shfl_xor_sync(0xffffffffu, sums.y, lanes);
        }
    }
    const int thread = thread_index();
    if (thread % 32 == 0) votes[thread / 32] = sums;
}

__device__ __forceinline__ bool count_votes(const SparseParams& p, const float2 (&votes)[WARPS]) {
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        sums.x += votes[i].x;
        sums.y += votes[i].y;
    }
    return p.tau > 0.f && (p.stop_rule == ALL_ROWS ? sums.x == WARPS : sums.x < p.tau * sums.y);
}

}  // namespace s2o::sm80
