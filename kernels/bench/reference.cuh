// Slow and obviously right: what runner.cu compares with. Shares no code with the engine but the parameter structs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../cuda/params.cuh"

namespace reference {

struct Strided {  // (batch, token, head, d), inner dimension contiguous
    const void* data;
    int64_t batch, token, head;
};

template <typename T>
__device__ float at(const Strided& x, int b, int t, int h, int d) {
    return float(static_cast<const T*>(x.data)[b * x.batch + t * x.token + h * x.head + d]);
}

// One warp per (sampled row, head, batch); two passes over the keys, double sums. out: (batch, rows, heads, D).
template <typename T, int D>
__global__ void dense(Strided q, Strided k, Strided v, float* out, float* lse, int heads, int kv_heads, int q_len,
                      int k_len, bool causal, float scale, int rows, int row_step) {
    const int lane = threadIdx.x, r = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int row = min(r * row_step, q_len - 1), kv = h / (heads / kv_heads);
    const int keys = causal ? k_len - q_len + row + 1 : k_len;
    float qv[D];
    for (int d = 0; d < D; ++d) qv[d] = at<T>(q, b, row, h, d);
    auto score = [&](int t) {
        float dot = 0;
        for (int d = 0; d < D; ++d) dot += qv[d] * at<T>(k, b, t, kv, d);
        return dot * scale;
    };
    float m = -INFINITY;
    for (int t = lane; t < keys; t += 32) m = fmaxf(m, score(t));
    for (int x = 16; x; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
    double sum = 0;
    float acc[D];
    for (int d = 0; d < D; ++d) acc[d] = 0;
    for (int t = lane; t < keys; t += 32) {
        const float p = expf(score(t) - m);
        sum += p;
        for (int d = 0; d < D; ++d) acc[d] += p * at<T>(v, b, t, kv, d);
    }
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
    for (int d = 0; d < D; ++d) {
        for (int x = 16; x; x /= 2) acc[d] += __shfl_xor_sync(~0u, acc[d], x);
        if (lane == 0) out[((int64_t(b) * rows + r) * heads + h) * D + d] = acc[d] / sum;
    }
    if (lane == 0) lse[(int64_t(b) * heads + h) * rows + r] = m + log(sum);
}

// One block per (query tile, head, batch), one thread per row: window tiles from the diagonal back, then prefix tiles
// in kv_perm order, stopping one tile after all rows gained less than tau. Positions cut at multiples of TILE_Q.
template <typename T, int D>
__global__ void sparse(Strided q, Strided k, Strided v, const int32_t* kv_perm, int64_t kv_perm_head_stride, float* out,
                       int32_t* visited, int heads, int kv_heads, int q_len, int k_len, int segment_len, float tau,
                       float scale) {
    const int offset = k_len - q_len, first = offset / s2o::TILE_Q, tile = first + blockIdx.x;
    const int h = blockIdx.y, b = blockIdx.z, kv = h / (heads / kv_heads);
    const int position = tile * s2o::TILE_Q + threadIdx.x, row = position - offset;
    const bool exists = row >= 0 && row < q_len;
    const int segment = tile * s2o::TILE_Q / segment_len, first_segment = first * s2o::TILE_Q / segment_len;
    const int window = tile - segment * segment_len / s2o::TILE_K + 1, prefix = segment * (segment_len / s2o::TILE_K);
    int64_t before = 0;
    for (int n = first_segment; n < segment; ++n) before += int64_t(n) * segment_len;
    const int32_t* perm = kv_perm + (int64_t(b) * heads + h) * kv_perm_head_stride + before;
    float m = -INFINITY, l = 0, acc[D], s[s2o::TILE_K];
    for (int d = 0; d < D; ++d) acc[d] = 0;
    int step = 0;
    bool stop_next = false;
    for (; step < window + prefix; ++step) {
        const bool last = stop_next;
        auto token = [&](int j) {
            return step < window ? (tile - step) * s2o::TILE_K + j : perm[(step - window) * s2o::TILE_K + j];
        };
        float tile_max = -INFINITY;
        for (int j = 0; j < s2o::TILE_K; ++j) {
            const int t = token(j);
            s[j] = -INFINITY;
            if (!exists || t > position || t >= k_len) continue;
            float dot = 0;
            for (int d = 0; d < D; ++d) dot += at<T>(q, b, row, h, d) * at<T>(k, b, t, kv, d);
            s[j] = dot * scale;
            tile_max = fmaxf(tile_max, s[j]);
        }
        bool below = true;
        if (exists) {
            const float new_max = fmaxf(m, tile_max), rescale = expf(m - new_max);
            float gain = 0;
            for (int d = 0; d < D; ++d) acc[d] *= rescale;
            for (int j = 0; j < s2o::TILE_K; ++j) {
                if (s[j] == -INFINITY) continue;
                const float p = expf(s[j] - new_max);
                gain += p;
                for (int d = 0; d < D; ++d) acc[d] += p * at<T>(v, b, token(j), kv, d);
            }
            below = gain < tau * l * rescale;
            l = l * rescale + gain;
            m = new_max;
        }
        stop_next = __syncthreads_and(below) && step >= window;
        if (last) {
            ++step;
            break;
        }
    }
    if (exists) {
        for (int d = 0; d < D; ++d) out[((int64_t(b) * q_len + row) * heads + h) * D + d] = acc[d] / l;
    }
    if (threadIdx.x == 0) visited[(int64_t(b) * heads + h) * gridDim.x + blockIdx.x] = step;
}

}  // namespace reference
