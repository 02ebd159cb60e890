// A slow and simple reference for runner.cu. It shares only the parameter structs with the engine.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../cuda/params.cuh"

namespace reference {

template <typename T>
__device__ float at(const void* x, const s2o::Strides& strides, int b, int t, int h, int d) {
    return float(static_cast<const T*>(x)[b * strides.batch + t * strides.seq + h * strides.head + d]);
}

// One warp per (sampled row, head, batch); two passes over the keys, double sums. out: (batch, rows, heads, D).
template <typename T, int D>
__global__ void dense(s2o::AttnParams p, int rows, int row_step, const uint8_t* blocks, float* out, float* lse) {
    const int lane = threadIdx.x, r = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int heads = p.num_heads, kv_heads = p.num_kv_heads, q_len = p.q_len, k_len = p.k_len;
    const bool causal = p.causal;
    const int row = min(r * row_step, q_len - 1), kv = h / (heads / kv_heads);
    const int keys = causal ? k_len - q_len + row + 1 : k_len;
    // `blocks`: whether key block j of query block i is visited, blocks cut as in BlockParams.
    const int offset = causal ? k_len - q_len : 0, key_blocks = (k_len + s2o::TILE_K - 1) / s2o::TILE_K;
    const int query_blocks = (offset + q_len - 1) / s2o::TILE_Q - offset / s2o::TILE_Q + 1;
    if (blocks) {
        const int query_block = (offset + row) / s2o::TILE_Q - offset / s2o::TILE_Q;
        blocks += ((int64_t(b) * heads + h) * query_blocks + query_block) * key_blocks;
    }
    float qv[D];
    for (int d = 0; d < D; ++d) qv[d] = at<T>(p.q, p.q_strides, b, row, h, d);
    auto score = [&](int t) {
        if (blocks && !blocks[t / s2o::TILE_K]) return -INFINITY;
        float dot = 0;
        for (int d = 0; d < D; ++d) dot += qv[d] * at<T>(p.k, p.k_strides, b, t, kv, d);
        return dot * p.softmax_scale;
    };
    float m = -INFINITY;
    for (int t = lane; t < keys; t += 32) m = fmaxf(m, score(t));
    for (int x = 16; x; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
    double sum = 0;
    float acc[D];
    for (int d = 0; d < D; ++d) acc[d] = 0;
    for (int t = lane; t < keys; t += 32) {
        const float x = score(t), weight = x == -INFINITY ? 0.f : expf(x - m);
        sum += weight;
        for (int d = 0; d < D; ++d) acc[d] += weight * at<T>(p.v, p.v_strides, b, t, kv, d);
    }
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
    for (int d = 0; d < D; ++d) {
        for (int x = 16; x; x /= 2) acc[d] += __shfl_xor_sync(~0u, acc[d], x);
        if (lane == 0) out[((int64_t(b) * rows + r) * heads + h) * D + d] = sum > 0 ? acc[d] / sum : 0.f;
    }
    if (lane == 0) lse[(int64_t(b) * heads + h) * rows + r] = m + log(sum);
}

// One block per (tile of a segment of the call, head, batch), one thread per row: window tiles from the diagonal back,
// then prefix tiles in kv_perm order. `lag` more tiles are kept after the one that triggers the stop. `permuted`: the
// rows of a tile are named by q_perm; the window is then visited first, for every row, and is not counted.
template <typename T, int D>
__global__ void s2o_attention(s2o::S2oParams p, int lag, bool permuted, float* out, float* lse, int32_t* visited) {
    const s2o::AttnParams& attn = p.attn;
    const int heads = attn.num_heads, q_len = attn.q_len, S = p.segment_len;
    const int offset = attn.k_len - q_len, call_segment = offset / S, tiles = S / s2o::TILE_Q;
    const int segment = call_segment + blockIdx.x / tiles, tile = blockIdx.x % tiles;
    if (segment < p.first_segment || segment >= p.first_segment + p.num_segments) return;
    const int h = blockIdx.y, b = blockIdx.z, kv = h / (heads / attn.num_kv_heads);
    const int64_t head = int64_t(b) * heads + h;
    int row = segment * S + tile * s2o::TILE_Q + threadIdx.x - offset, row_end = p.ranked_rows;
    if (permuted) {
        row = max(0, segment * S - offset) + tile * s2o::TILE_Q + threadIdx.x;
        row_end = min(row_end, (segment + 1) * S - offset);
    }
    const bool exists = row >= 0 && row < row_end;
    if (permuted && exists) row = p.q_perm[head * q_len + row];
    const int position = row + offset;
    int64_t before = 0;
    for (int n = p.first_segment; n < segment; ++n) before += int64_t(n) * S;
    const int32_t* perm = p.kv_perm + head * p.kv_perm_head_stride + before;
    const int window = permuted ? tiles : tile + 1, prefix = segment * tiles;
    const float scale = attn.softmax_scale;
    float m = -INFINITY, l = 0, acc[D], s[s2o::TILE_K];
    for (int d = 0; d < D; ++d) acc[d] = 0;
    __shared__ float gains[s2o::TILE_Q], masses[s2o::TILE_Q];
    __shared__ bool there[s2o::TILE_Q];
    int step = 0, keep = -1;
    for (; step < window + prefix; ++step) {
        auto token = [&](int j) {
            return step < window ? segment * S + (window - 1 - step) * s2o::TILE_K + j
                                 : perm[(step - window) * s2o::TILE_K + j];
        };
        float tile_max = -INFINITY;
        for (int j = 0; j < s2o::TILE_K; ++j) {
            const int t = token(j);
            s[j] = -INFINITY;
            if (!exists || t > position || t >= attn.k_len) continue;
            float dot = 0;
            for (int d = 0; d < D; ++d) {
                dot += at<T>(attn.q, attn.q_strides, b, row, h, d) * at<T>(attn.k, attn.k_strides, b, t, kv, d);
            }
            s[j] = dot * scale;
            tile_max = fmaxf(tile_max, s[j]);
        }
        const float new_max = fmaxf(m, tile_max), rescale = m == -INFINITY ? 0.f : expf(m - new_max);
        float gain = 0;
        for (int j = 0; j < s2o::TILE_K; ++j) gain += s[j] == -INFINITY ? 0.f : expf(s[j] - new_max);
        there[threadIdx.x] = exists;
        gains[threadIdx.x] = p.literal_frame ? l * rescale + gain - l : gain;
        masses[threadIdx.x] = p.literal_frame ? l : l * rescale;
        __syncthreads();
        bool triggers = false;
        if (keep < 0 && step >= window && p.tau > 0) {
            double ratio = 0, gain_sum = 0, mass_sum = 0, rows = 0;
            triggers = true;
            for (int r = 0; r < s2o::TILE_Q; ++r) {
                if (!there[r]) continue;
                if (p.stop_rule == s2o::ALL_ROWS) triggers &= gains[r] < p.tau * masses[r];
                ratio += gains[r] / masses[r];
                gain_sum += gains[r];
                mass_sum += masses[r];
                rows += 1;
            }
            if (p.stop_rule == s2o::MEAN_RATIO) triggers = ratio < p.tau * rows;
            if (p.stop_rule == s2o::SUM_RATIO) triggers = gain_sum < p.tau * mass_sum;
        }
        __syncthreads();
        if (triggers) keep = lag;
        if (exists && !(triggers && p.discard)) {
            for (int d = 0; d < D; ++d) acc[d] *= rescale;
            for (int j = 0; j < s2o::TILE_K; ++j) {
                if (s[j] == -INFINITY) continue;
                const float probability = expf(s[j] - new_max);
                for (int d = 0; d < D; ++d) acc[d] += probability * at<T>(attn.v, attn.v_strides, b, token(j), kv, d);
            }
            l = l * rescale + gain;
            m = new_max;
        }
        if (keep == 0) {
            ++step;
            break;
        }
        if (keep > 0) --keep;
    }
    if (exists) {
        for (int d = 0; d < D; ++d) out[((int64_t(b) * q_len + row) * heads + h) * D + d] = acc[d] / l;
        lse[head * q_len + row] = m + logf(l);
    }
    const int count = step - (permuted ? window : 0);
    if (__syncthreads_or(exists) && threadIdx.x == 0 && (!permuted || prefix > 0)) {
        visited[head * gridDim.x + blockIdx.x] = count;
    }
}

}  // namespace reference
