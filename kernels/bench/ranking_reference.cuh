// A slow and simple reference for ranking.cu: scores in double precision.
#pragma once
#include <cstdint>

#include "../cuda/ranking_params.cuh"

namespace reference {

// Whether every element of a row of q is finite. One thread per (row, head, batch).
template <typename T>
__global__ void finite_queries(s2o::RankingParams p, int head_dim, uint8_t* finite) {
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i >= int64_t(p.batch) * p.num_heads * p.q_len) return;
    const int row = i % p.q_len, head = i / p.q_len % p.num_heads, b = i / p.q_len / p.num_heads;
    const T* q = static_cast<const T*>(p.q) + b * p.q_strides.batch + row * p.q_strides.seq + head * p.q_strides.head;
    bool all = true;
    for (int d = 0; d < head_dim; ++d) all = all && isfinite(float(q[d]));
    finite[i] = all;
}

// Mean and variance of segment n, one block per (head, segment, batch), one thread per dimension.
template <typename T>
__global__ void coefficients(s2o::RankingParams p, const uint8_t* finite, double* mean, double* square) {
    const int head = blockIdx.x, n = p.first_segment + blockIdx.y, b = blockIdx.z, d = threadIdx.x;
    const s2o::SegmentRows rows = s2o::segment_rows(p, n);
    double sum = 0, squares = 0;
    int64_t count = 0;
    auto q = [&](int row) {
        const int64_t at = b * p.q_strides.batch + row * p.q_strides.seq + head * p.q_strides.head;
        return double(float(static_cast<const T*>(p.q)[at + d]));
    };
    const uint8_t* ok = finite + (int64_t(b) * p.num_heads + head) * p.q_len;
    for (int row = rows.begin; row < rows.end; ++row) {
        if (ok[row]) sum += q(row), ++count;
    }
    const double average = count ? sum / count : 0;
    for (int row = rows.begin; row < rows.end; ++row) {
        if (ok[row]) squares += (q(row) - average) * (q(row) - average);
    }
    const double scale = p.softmax_scale;
    const int64_t at = ((int64_t(b) * p.num_heads + head) * p.num_segments + blockIdx.y) * blockDim.x + d;
    mean[at] = scale * average;
    square[at] = double(p.second_cumulant) * scale * scale * (count ? squares / count : 0);
}

// Scores, and the error that the 16-bit products may make in each.
template <typename T>
__global__ void scores(s2o::RankingParams p, int head_dim, const double* mean, const double* square, double* scores,
                       double* errors) {
    const int head = blockIdx.x % p.num_heads, b = blockIdx.x / p.num_heads, n = p.first_segment + blockIdx.y;
    const int key = blockIdx.z * blockDim.x + threadIdx.x, kv_head = head / (p.num_heads / p.num_kv_heads);
    if (key >= n * p.segment_len) return;
    const int64_t at = ((int64_t(b) * p.num_heads + head) * p.num_segments + blockIdx.y) * head_dim;
    const int64_t first = b * p.k_strides.batch + key * p.k_strides.seq + kv_head * p.k_strides.head;
    const T* k = static_cast<const T*>(p.k) + first;
    double sum = 0, linear = 0, second = 0, size = 0;
    for (int d = 0; d < head_dim; ++d) {
        const double x = float(k[d]), a = mean[at + d] * x, c = p.second_cumulant == 0 ? 0 : square[at + d] * x * x;
        sum += a + c;
        linear += a * a;
        second += c * c;
        size += fabs(a) + c;
    }
    const int64_t out = blockIdx.x * p.kv_perm_head_stride + s2o::prefix_row(p, n) + key;
    scores[out] = sum;
    errors[out] = ldexp(sqrt(second), -8) + ldexp(sqrt(linear), -15) + ldexp(size, -20);
}

}  // namespace reference
