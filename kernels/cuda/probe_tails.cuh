// Per head and segment: the skipped keys' common tail, from the exact outputs of the probes, and the measured error. As
// crates/s2o-core/src/probes; no sum depends on an order of arrival.
#pragma once
#include "probe_rows.cuh"

namespace s2o {

constexpr int TAIL_THREADS = 128, TAIL_WARPS = TAIL_THREADS / 32;

// A probe of one head, `D / 32` elements in each lane. See `Probe` of probes/mod.rs.
template <typename T, int D>
struct Probe {
    static constexpr int N = D / 32;
    float out[N], exact[N];
    double weight;
    double expected;  // mass of the skipped keys
    double skipped;
    int position;
    bool skips, finite;

    __device__ __forceinline__ Probe(const ProbeParams& p, int batch_head, const ProbeRow& probe) {
        weight = p.weights[probe.index];
        position = p.positions[probe.index];
        const int row = position - offset_of_call(p);
        const float mass = expected_mass(p, call_row(p, batch_head, row));
        skips = mass != SAW_ALL_KEYS;
        expected = skips ? mass : 0.0;
        skipped = 0.0;
        if (skips) {
            const double visited = p.lse[call_row(p, batch_head, row)], all = p.split.attn.lse[probe.row];
            skipped = -expm1(visited - all);
            // Rounding must not make mass negative; NaN stays.
            if (skipped < 0.0) skipped = 0.0;
        }
        const T* out_row = static_cast<const T*>(p.out) + out_element(p, batch_head, row);
        const T* exact_row = skips ? static_cast<const T*>(p.split.attn.out) + probe.element : out_row;
        bool all_finite = isfinite(skipped);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            out[i] = float(out_row[threadIdx.x % 32 + 32 * i]);
            exact[i] = float(exact_row[threadIdx.x % 32 + 32 * i]);
            all_finite = all_finite && isfinite(out[i]) && isfinite(exact[i]);
        }
        finite = __all_sync(~0u, all_finite);
    }

    // The skipped keys' part of the exact output.
    __device__ __forceinline__ double tail(int i) const { return exact[i] - (1.0 - skipped) * out[i]; }
};

// Sums over probes. See `Tail` of probes/mod.rs.
struct TailSums {
    double skipped, expected;

    __device__ __forceinline__ void add(double weight, double skipped_share, double mass) {
        skipped += weight * skipped_share;
        expected += weight * mass * (1.0 - skipped_share);
    }
    // The skipped mass over its expectation.
    __device__ __forceinline__ double scale() const { return skipped / expected; }
    __device__ __forceinline__ bool has_tail() const {
        return skipped > 0.0 && expected > 0.0 && isfinite(float(scale()));
    }
};

// Calls f(probe) for this warp's probes of a segment of the call.
template <typename T, int D, class F>
__device__ __forceinline__ void for_each_probe(const ProbeParams& p, int batch_head, int segment, F f) {
    for (int j = threadIdx.x / 32; j < p.slots; j += TAIL_WARPS) {
        const ProbeRow probe(p, batch_head, (segment - p.group_first) * p.slots + j);
        if (p.weights[probe.index] > 0.f) f(Probe<T, D>(p, batch_head, probe));
    }
}

// Tiles that the last pass computed for a unit.
__device__ __forceinline__ int computed_tiles(const ProbeParams& p, int64_t unit, int segment_of_call) {
    const Positions rows(p, segment_of_call);
    const int segment = p.first_segment + segment_of_call;
    const int start = p.permuted ? rows.begin : segment * p.segment_len;
    int tiles = 0;
    for (int tile = (rows.begin - start) / TILE_Q; tile <= (rows.end - 1 - start) / TILE_Q; ++tile) {
        // A pass over permuted queries counts the prefix alone.
        const int last = min(start + (tile + 1) * TILE_Q, rows.end) - 1;
        if (p.permuted) tiles += (last - segment * p.segment_len) / TILE_K + 1;
        if (!p.permuted || segment > 0) tiles += p.tiles_visited[unit * (p.segment_len / TILE_Q) + tile];
    }
    return tiles;
}

// Grid: a block for each unit of the list, or for each segment of the group and head.
template <typename T, int D>
__device__ __forceinline__ void probe_tails(const ProbeParams& p) {
    constexpr int N = D / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (p.units.units != nullptr && int(blockIdx.x) >= *p.units.count) return;
    int64_t unit = int(blockIdx.x) / p.group_segments * p.segments + p.group_first + int(blockIdx.x) % p.group_segments;
    if (p.units.units != nullptr) unit = p.units.units[blockIdx.x];
    const int batch_head = int(unit / p.segments), segment = int(unit - int64_t(batch_head) * p.segments);

    __shared__ double tails[TAIL_WARPS][D];
    __shared__ TailSums sums_of_warp[TAIL_WARPS];
    double tail[N] = {};
    TailSums all = {};
    for_each_probe<T, D>(p, batch_head, segment, [&](const Probe<T, D>& probe) {
        if (!probe.finite) return;
        all.add(probe.weight, probe.skipped, probe.expected);
#pragma unroll
        for (int i = 0; i < N; ++i) tail[i] += probe.weight * probe.tail(i);
    });
#pragma unroll
    for (int i = 0; i < N; ++i) tails[warp][lane + 32 * i] = tail[i];
    if (lane == 0) sums_of_warp[warp] = all;
    __syncthreads();
    all = {};
    for (int w = 0; w < TAIL_WARPS; ++w) {
        all.skipped += sums_of_warp[w].skipped;
        all.expected += sums_of_warp[w].expected;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        tail[i] = 0.0;
        for (int w = 0; w < TAIL_WARPS; ++w) tail[i] += tails[w][lane + 32 * i];
    }

    // Of finite probes: errors before and after the correction. Of all probes: norm, error before, remaining error
    // without and with the correction, skipped mass, norm^2, norm * remaining and remaining^2 of both, number, keys.
    constexpr int COUNT = 14;
    __shared__ double errors_of_warp[TAIL_WARPS][COUNT];
    double errors[COUNT] = {};
    for_each_probe<T, D>(p, batch_head, segment, [&](const Probe<T, D>& probe) {
        // The tail of the other probes.
        TailSums others = all;
        double own[N] = {};
        if (probe.finite) {
            others.add(-probe.weight, probe.skipped, probe.expected);
#pragma unroll
            for (int i = 0; i < N; ++i) own[i] = probe.weight * probe.tail(i);
        }
        const bool corrects = probe.skips && others.has_tail();
        const double mass = corrects ? others.scale() * probe.expected : 0.0;
        double norm = 0.0, before = 0.0, after = 0.0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double exact = probe.exact[i], out = probe.out[i];
            const double corrected =
                corrects ? (out + mass * (tail[i] - own[i]) / others.skipped) / (1.0 + mass) : out;
            norm += exact * exact;
            before += (out - exact) * (out - exact);
            after += (corrected - exact) * (corrected - exact);
        }
        norm = probe.weight * warp_sum(norm), before = warp_sum(before), after = warp_sum(after);
        if (probe.finite) errors[0] += probe.weight * before, errors[1] += probe.weight * after;
        // The probe itself is exact.
        const double without = (probe.weight - 1.0) * before, with = (probe.weight - 1.0) * after;
        const double of_all[COUNT - 2] = {
            norm,           probe.weight * before, without,     with,        probe.weight * probe.skipped, norm * norm,
            norm * without, without * without,     norm * with, with * with,
            1.0,            probe.position + 1.0};
#pragma unroll
        for (int i = 2; i < COUNT; ++i) errors[i] += of_all[i - 2];
    });
    if (lane == 0) {
        for (int i = 0; i < COUNT; ++i) errors_of_warp[warp][i] = errors[i];
    }
    __syncthreads();
    for (int i = 0; i < COUNT; ++i) {
        errors[i] = 0.0;
        for (int w = 0; w < TAIL_WARPS; ++w) errors[i] += errors_of_warp[w][i];
    }
    // A correction that probes which did not contribute to it do not confirm is left out.
    const bool helps = all.has_tail() && errors[1] < errors[0];
    if (warp == 0) {
        for (int i = 0; i < N; ++i) p.tail_value[unit * D + lane + 32 * i] = helps ? float(tail[i] / all.skipped) : 0.f;
    }
    if (threadIdx.x == 0) {
        p.tail_scale[unit] = helps ? float(all.scale()) : 0.f;
        double* sums = p.sums + unit * PROBE_SUMS;
        sums[0] = errors[2], sums[1] = errors[3], sums[2] = helps ? errors[5] : errors[4], sums[3] = errors[6];
        sums[4] = errors[7], sums[5] = helps ? errors[10] : errors[8], sums[6] = helps ? errors[11] : errors[9];
        sums[7] = errors[12], sums[8] = errors[13];
        if (p.next_pass != nullptr) {
            // As ErrorControl::next. A comparison with NaN is false.
            const double error = sums[0] == 0.0 ? 0.0 : sqrt(sums[2] / sums[0]);
            const bool again = p.pass < LAST_PASS && error > p.max_error;
            p.next_pass[unit] = !again ? 0 : error <= p.max_error * p.reach ? p.pass + 1 : LAST_PASS;
            if (again) {
                p.repeated[unit].x += computed_tiles(p, unit, segment);
                p.repeated[unit].y += 1;
            }
        }
    }
}

}  // namespace s2o
