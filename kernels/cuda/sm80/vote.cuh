// The stop decision of a query tile, as crates/s2o/src/early_stop.rs, taken before the next key tile.
//
// Every warp casts a pair of numbers into shared memory; after a barrier that the ring needs anyway every thread adds the
// pairs up in one order. So all threads of a block decide alike, and two runs too.
#pragma once
#include "../online_softmax.cuh"
#include "traits.cuh"

namespace s2o::sm80 {

// Softmax states of the rows of a thread before the current key tile, which is in OnlineSoftmax::row_sum alone.
struct Committed {
    float row_max[2][2], row_sum[2][2];

    __device__ __forceinline__ float rescale(const OnlineSoftmax (&softmax)[2], float scale_log2, int m, int h) const {
        return exp2_approx((row_max[m][h] - softmax[m].row_max[h]) * scale_log2);
    }
    __device__ __forceinline__ void commit(OnlineSoftmax (&softmax)[2], float scale_log2) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_sum[m][h] = fmaf(row_sum[m][h], rescale(softmax, scale_log2, m, h), softmax[m].row_sum[h]);
                row_max[m][h] = softmax[m].row_max[h];
                softmax[m].row_sum[h] = 0.f;
            }
        }
    }
};

__device__ __forceinline__ float2 cast_vote(const SparseParams& p, const Committed& before,
                                            const OnlineSoftmax (&softmax)[2], float scale_log2, const WorkItem& w) {
    const int first_row = w.q_start + threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / 4;
    bool below = true;
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float old_sum = quad_sum(before.row_sum[m][h]);
            float gain = quad_sum(softmax[m].row_sum[h]);
            float mass = old_sum * before.rescale(softmax, scale_log2, m, h);
            if (p.literal_frame) {
                gain = mass + gain - old_sum;
                mass = old_sum;
            }
            const int row = first_row + m * 16 + h * 8;
            if (row >= 0 && row < w.row_end) {
                // Written so that NaN never counts as below.
                below = below && gain < p.tau * mass;
                sums.x += p.stop_rule == MEAN_RATIO ? gain / mass : gain;
                sums.y += p.stop_rule == MEAN_RATIO ? 1.f : mass;
            }
        }
    }
    if (p.stop_rule == ALL_ROWS) {
        sums.x = __all_sync(0xffffffffu, below) ? 1.f : 0.f;
    } else {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
            sums.x += __shfl_xor_sync(0xffffffffu, sums.x, lanes);
            sums.y += __shfl_xor_sync(0xffffffffu, sums.y, lanes);
        }
    }
    return sums;
}

__device__ __forceinline__ bool count_votes(const SparseParams& p, const float2 (&votes)[WARPS]) {
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        sums.x += votes[i].x;
        sums.y += votes[i].y;
    }
    return p.stop_rule == ALL_ROWS ? sums.x == WARPS : sums.x < p.tau * sums.y;
}

}  // namespace s2o::sm80
