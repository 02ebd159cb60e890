// The steps around the exact attention of the probes (probe_params.cuh). No sum depends on an order of arrival.
#include "launch.cuh"
#include "pair.cuh"
#include "probe_params.cuh"

namespace s2o {

constexpr int PROBE_THREADS = 256;
constexpr int TAIL_THREADS = 128, TAIL_WARPS = TAIL_THREADS / 32;

// The output function of SplitMix64, as in `mixed` of probes/mod.rs.
__device__ __forceinline__ uint64_t mixed(uint64_t index) {
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

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

// A probe's index in `positions`, its row in the log-sum-exps, and the element of its query and exact output.
struct ProbeRow {
    int64_t index, row, element;
    __device__ __forceinline__ ProbeRow(const ProbeParams& p, int batch_head, int slot) {
        const AttnParams& attn = p.split.attn;
        const int batch = batch_head / p.num_heads, head = batch_head - batch * p.num_heads;
        const int kv_head = head / p.group;
        const int64_t in_head = int64_t(slot) * p.group + head % p.group;
        index = int64_t(batch_head) * (p.group_segments * p.slots) + slot;
        row = (int64_t(batch) * attn.num_heads + kv_head) * attn.q_len + in_head;
        element = batch * attn.out_strides.batch + in_head * attn.out_strides.seq + kv_head * attn.out_strides.head;
    }
};

// Sum over the warp, in every lane.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

// Share of the probability that all queries of a run have alike, as EVEN_SHARE of probes/mod.rs.
constexpr double EVEN_SHARE = 0.25;

// Chooses the probe of a run, as `choose` of probes/mod.rs, and copies its query. Grid: a warp for each slot of the group
// and head, heads in y.
template <typename T, int D>
__device__ __forceinline__ void probe_choice(const ProbeParams& p) {
    const int lane = threadIdx.x % 32, batch_head = blockIdx.y;
    const int slot = int(blockIdx.x) * (PROBE_THREADS / 32) + int(threadIdx.x) / 32;
    if (slot >= p.group_segments * p.slots) return;
    const ProbeRow probe(p, batch_head, slot);
    const Positions run = run_of(p, slot);
    const int offset = offset_of_call(p), count = run.end - run.begin;
    if (count <= 0) {
        if (lane == 0) {
            p.positions[probe.index] = min(run.begin, p.split.attn.k_len - 1);
            p.weights[probe.index] = 0.f;
        }
        return;
    }
    // Expected size of the error of each query: last gain times norm of the output.
    const int64_t first_row = call_row(p, batch_head, run.begin - offset);
    auto expected = [&](int i) {
        const float gain = i < count ? p.last_gain[first_row + i] : 0.f;
        if (!(gain > 0.f)) return 0.0;
        const float size = gain * p.out_norm[first_row + i];
        return isfinite(size) ? double(size) : 0.0;
    };
    double total = 0.0;
    for (int first = 0; first < count; first += 32) total += expected(first + lane);
    total = warp_sum(total);
    const double even = (total > 0.0 ? EVEN_SHARE : 1.0) / count, in_proportion = 1.0 - EVEN_SHARE;
    const int in_group = batch_head % p.num_heads % p.group;
    const int64_t number = (int64_t(run.begin) / p.stride) ^ (int64_t(in_group) << 32);
    double left = double(mixed(number) >> 11) * 0x1p-53;
    int chosen = count - 1;
    double weight = 0.0;
    for (int first = 0; first < count && weight == 0.0; first += 32) {
        const int i = first + lane;
        const double own = i < count ? even + (total > 0.0 ? in_proportion * expected(i) / total : 0.0) : 0.0;
        double before = own;  // inclusive sum over the lanes
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
        // Rounding may leave a rest after the last query.
        const bool last = i == count - 1;
        const uint32_t reached = __ballot_sync(~0u, i < count && (before > left || last));
        if (reached != 0) {
            chosen = first + __ffs(reached) - 1;
            weight = 1.0 / __shfl_sync(~0u, own, __ffs(reached) - 1);
        }
        left -= __shfl_sync(~0u, before, 31);
    }
    if (lane == 0) {
        p.positions[probe.index] = run.begin + chosen;
        p.weights[probe.index] = float(weight);
    }
    if (lane < D / 8) {
        const int batch = batch_head / p.num_heads, head = batch_head - batch * p.num_heads;
        const int64_t row = run.begin + chosen - offset;
        const int64_t from = batch * p.q_strides.batch + row * p.q_strides.seq + head * p.q_strides.head;
        *vector_at(p.split.attn.q, probe.element, lane) = *vector_at(p.q, from, lane);
    }
}

// A probe of one head, `D / 32` elements in each lane. See `Probe` of probes/mod.rs.
template <typename T, int D>
struct Probe {
    static constexpr int N = D / 32;
    float out[N], exact[N];
    double weight;
    double gain;  // of the last tile, 0 if the row saw every key
    double skipped;
    int position;
    bool skips, finite;

    __device__ __forceinline__ Probe(const ProbeParams& p, int batch_head, const ProbeRow& probe) {
        weight = p.weights[probe.index];
        position = p.positions[probe.index];
        const int row = position - offset_of_call(p);
        const float last_gain = p.last_gain[call_row(p, batch_head, row)];
        skips = last_gain >= 0.f;
        gain = skips ? last_gain : 0.0;
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
    double count, skipped, gain;

    __device__ __forceinline__ void add(double weight, double skipped_mass, double last_gain) {
        count += weight;
        skipped += weight * skipped_mass;
        gain += weight * last_gain * (1.0 - skipped_mass);
    }
    __device__ __forceinline__ bool has_tail() const { return skipped > 0.0 && gain > 0.0 && skipped < count; }
    // The squared skipped mass over the last gain.
    __device__ __forceinline__ double scale() const { return skipped / (count - skipped) * (skipped / gain); }
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
    TailSums all = {0.0, 0.0, 0.0};
    for_each_probe<T, D>(p, batch_head, segment, [&](const Probe<T, D>& probe) {
        if (!probe.finite) return;
        all.add(probe.weight, probe.skipped, probe.gain);
#pragma unroll
        for (int i = 0; i < N; ++i) tail[i] += probe.weight * probe.tail(i);
    });
#pragma unroll
    for (int i = 0; i < N; ++i) tails[warp][lane + 32 * i] = tail[i];
    if (lane == 0) sums_of_warp[warp] = all;
    __syncthreads();
    all = {0.0, 0.0, 0.0};
    for (int w = 0; w < TAIL_WARPS; ++w) {
        all.count += sums_of_warp[w].count;
        all.skipped += sums_of_warp[w].skipped;
        all.gain += sums_of_warp[w].gain;
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
            others.add(-probe.weight, probe.skipped, probe.gain);
#pragma unroll
            for (int i = 0; i < N; ++i) own[i] = probe.weight * probe.tail(i);
        }
        const bool corrects = probe.skips && others.has_tail();
        const double mass = corrects ? sqrt(others.scale() * probe.gain) : 0.0;
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

// Lists the units of a group of segments that need pass `pass`, or all of them for pass 0. Grid: one block.
__device__ __forceinline__ void probe_units(const ProbeParams& p) {
    const int heads = p.split.attn.batch * p.num_heads, units = heads * p.group_segments;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __shared__ int of_warp[PROBE_THREADS / 32];
    int listed = 0;
    for (int first = 0; first < units; first += PROBE_THREADS) {
        const int i = first + int(threadIdx.x);
        // The last segments, whose prefixes are the longest, come first.
        const int unit = i % heads * p.segments + p.group_first + p.group_segments - 1 - i / heads;
        const bool wanted = i < units && p.next_pass[unit] == p.pass;
        const uint32_t ballot = __ballot_sync(~0u, wanted);
        if (lane == 0) of_warp[warp] = __popc(ballot);
        __syncthreads();
        int place = listed + __popc(ballot & ((1u << lane) - 1));
        for (int w = 0; w < PROBE_THREADS / 32; ++w) {
            if (w < warp) place += of_warp[w];
            listed += of_warp[w];
        }
        if (wanted) p.unit_list[place] = unit;
        __syncthreads();
    }
    if (threadIdx.x == 0) *p.unit_count = listed;
}

template <typename T>
__device__ __forceinline__ bool all_finite(uint32_t pair) {
    const float2 x = unpack<T>(pair);
    return isfinite(x.x) && isfinite(x.y);
}

// Positions that a block corrects, from a multiple of their number on: all in one segment.
constexpr int CORRECTED = 64;

// Grid (blocks for the positions of the group, batch * num_heads). A thread corrects eight columns of several rows, whose
// loads are in flight together.
template <typename T, int D>
__device__ __forceinline__ void probe_correction(const ProbeParams& p) {
    constexpr int VECTORS = D / 8, ROWS = PROBE_THREADS / VECTORS, STEPS = CORRECTED / ROWS;
    const int batch_head = blockIdx.y, i = threadIdx.x % VECTORS, offset = offset_of_call(p);
    const int begin = Positions(p, p.group_first).begin, end = Positions(p, p.group_first + p.group_segments - 1).end;
    const int first = (begin / CORRECTED + int(blockIdx.x)) * CORRECTED;
    const int64_t unit = int64_t(batch_head) * p.segments + first / p.segment_len - p.first_segment;
    const float scale = p.tail_scale[unit];
    if (scale == 0.f) return;
    uint4* out[STEPS];
    uint4 words[STEPS];
    float gains[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int position = first + s * ROWS + int(threadIdx.x) / VECTORS;
        const bool exists = position >= begin && position < end;
        const int row = exists ? position - offset : 0;
        gains[s] = exists ? p.last_gain[call_row(p, batch_head, row)] : SAW_ALL_KEYS;
        out[s] = vector_at(p.out, out_element(p, batch_head, row), i);
        words[s] = *out[s];
    }
    const float4* tail = reinterpret_cast<const float4*>(p.tail_value + unit * D) + 2 * i;
    const float4 low = tail[0], high = tail[1];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        // Rows that saw every key have no gain.
        if (!(gains[s] >= 0.f)) continue;
        const float mass = sqrtf(scale * gains[s]), keep = 1.f / (1.f + mass), add = mass * keep;
        auto correct = [&](uint32_t word, float u0, float u1) {
            const float2 o = unpack<T>(word);
            return pack<T>(fmaf(o.x, keep, u0 * add), fmaf(o.y, keep, u1 * add));
        };
        *out[s] = make_uint4(correct(words[s].x, low.x, low.y), correct(words[s].y, low.z, low.w),
                             correct(words[s].z, high.x, high.y), correct(words[s].w, high.z, high.w));
    }
}

// Grid: a warp for each slot of the group, heads in y.
template <typename T, int D>
__device__ __forceinline__ void probe_outputs(const ProbeParams& p) {
    const int lane = threadIdx.x % 32, batch_head = blockIdx.y;
    const int slot = int(blockIdx.x) * (PROBE_THREADS / 32) + int(threadIdx.x) / 32;
    if (slot >= p.group_segments * p.slots) return;
    const ProbeRow probe(p, batch_head, slot);
    const int row = p.positions[probe.index] - offset_of_call(p);
    if (p.weights[probe.index] == 0.f || !(p.last_gain[call_row(p, batch_head, row)] >= 0.f)) return;
    // The tiles of the probes reach beyond a probe's position: keys there have no weight, but 0 * NaN is NaN. A probe
    // whose exact output is not finite keeps its own.
    const bool has_vector = lane < D / 8;
    const uint4 exact = has_vector ? *vector_at(p.split.attn.out, probe.element, lane) : make_uint4(0, 0, 0, 0);
    const bool finite =
        all_finite<T>(exact.x) && all_finite<T>(exact.y) && all_finite<T>(exact.z) && all_finite<T>(exact.w);
    if (__all_sync(~0u, finite) && has_vector) *vector_at(p.out, out_element(p, batch_head, row), lane) = exact;
}

}  // namespace s2o

#define S2O_PROBE_KERNEL(name, threads, body)                                         \
    extern "C" { __constant__ s2o::LaunchInfo name##_launch = {threads, 0, 0, 0}; } \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ s2o::ProbeParams p) { body(p); }

#define S2O_PROBE_KERNELS(suffix, ...)                                                                    \
    S2O_PROBE_KERNEL(s2o_probe_choice_##suffix, s2o::PROBE_THREADS, (s2o::probe_choice<__VA_ARGS__>))    \
    S2O_PROBE_KERNEL(s2o_probe_outputs_##suffix, s2o::PROBE_THREADS, (s2o::probe_outputs<__VA_ARGS__>)) \
    S2O_PROBE_KERNEL(s2o_probe_tails_##suffix, s2o::TAIL_THREADS, (s2o::probe_tails<__VA_ARGS__>)) \
    S2O_PROBE_KERNEL(s2o_probe_correction_##suffix, s2o::PROBE_THREADS, (s2o::probe_correction<__VA_ARGS__>))

S2O_PROBE_KERNEL(s2o_probe_units, s2o::PROBE_THREADS, s2o::probe_units)
S2O_PROBE_KERNELS(bf16_256, __nv_bfloat16, 256)
S2O_PROBE_KERNELS(bf16_128, __nv_bfloat16, 128)
S2O_PROBE_KERNELS(bf16_64, __nv_bfloat16, 64)
S2O_PROBE_KERNELS(f16_256, __half, 256)
S2O_PROBE_KERNELS(f16_128, __half, 128)
S2O_PROBE_KERNELS(f16_64, __half, 64)
