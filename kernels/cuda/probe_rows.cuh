// Used by all kernels around the probes: the places of a probe and of a row of the call in the tensors of probe_params.cuh, and
// a sum.
#pragma once
#include "probe_params.cuh"

namespace s2o {

// Row of (batch, num_heads, q_len).
__device__ __forceinline__ int64_t call_row(const ProbeParams& p, int batch_head, int row) {
    return int64_t(batch_head) * p.q_len + row;
}

// Vector `i` of a row of heads, eight elements each.
__device__ __forceinline__ uint4* vector_at(const void* base, int64_t element, int i) {
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(base)) + element) + i;
}

// Element of the call's output.
__device__ __forceinline__ int64_t out_element(const ProbeParams& p, int batch_head, int row) {
    const int batch = batch_head / p.num_heads, head = batch_head - batch * p.num_heads;
    return batch * p.out_strides.batch + row * p.out_strides.seq + head * p.out_strides.head;
}

// A probe's index in `positions`, its row in the log-sum-exps, and the element of its query, and of its exact output
// where that has the strides of the queries.
struct ProbeRow {
    int64_t index, row, element;
    __device__ __forceinline__ ProbeRow(const ProbeParams& p, int batch_head, int slot) {
        const AttnParams& attn = p.split.attn;
        const int batch = batch_head / p.num_heads, head = batch_head - batch * p.num_heads;
        const int kv_head = head / p.group;
        const int64_t in_head = int64_t(slot) * p.group + head % p.group;
        index = int64_t(batch_head) * (p.group_segments * p.slots) + slot;
        row = (int64_t(batch) * attn.num_heads + kv_head) * attn.q_len + in_head;
        element = batch * attn.q_strides.batch + in_head * attn.q_strides.seq + kv_head * attn.q_strides.head;
    }
};

// The expected mass of the keys that a row skipped, over that of the visited keys, up to a factor of the segment; SAW_ALL_KEYS
// if it skipped none. As `expected_mass` of probes/expected.rs.
__device__ __forceinline__ float expected_mass(const ProbeParams& p, int64_t row) {
    // All loads before the branch. A row that saw all keys may have no score.
    const float norm = p.out_norm[row], log_mass = p.prefix_score[row] - p.lse[row];
    if (norm < 0.f) return SAW_ALL_KEYS;
    return log_mass == log_mass ? __expf(fminf(fmaxf(log_mass, -30.f), 0.f)) : 0.f;
}

// Sum over the warp, in every lane.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

}  // namespace s2o
