// The steps around the exact attention of the probes (probe_params.cuh). No sum depends on an order of arrival.
#include "launch.cuh"
#include "pair.cuh"
#include "probe_tails.cuh"

namespace s2o {

constexpr int PROBE_THREADS = 256;

// The output function of SplitMix64, as in `mixed` of probes/mod.rs.
__device__ __forceinline__ uint64_t mixed(uint64_t index) {
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Share of the probability that all queries of a run have alike, as EVEN_SHARE of probes/mod.rs.
constexpr double EVEN_SHARE = 0.25;

// Makes the query at `position` that of a probe. A warp calls it.
template <int D>
__device__ __forceinline__ void take_query(const ProbeParams& p, int batch_head, const ProbeRow& probe, int position) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) p.positions[probe.index] = position;
    if (lane < D / 8) {
        const int batch = batch_head / p.num_heads, head = batch_head - batch * p.num_heads;
        const int64_t row = position - offset_of_call(p);
        const int64_t from = batch * p.q_strides.batch + row * p.q_strides.seq + head * p.q_strides.head;
        *vector_at(p.split.attn.q, probe.element, lane) = *vector_at(p.q, from, lane);
    }
}

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
    // Expected size of the error of each query: expected mass times norm of the output. A lane has every 32nd query of a
    // stretch of the run, whose loads are in flight together.
    constexpr int IN_FLIGHT = 8, STRETCH = 32 * IN_FLIGHT;
    const int64_t first_row = call_row(p, batch_head, run.begin - offset);
    double expected[IN_FLIGHT];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int query = first + 32 * i + lane;
            const int64_t row = first_row + min(query, count - 1);
            const float mass = expected_mass(p, row), norm = p.out_norm[row];
            const double size = double(mass) * norm;
            expected[i] = query < count && mass > 0.f && isfinite(size) ? size : 0.0;
        }
    };
    double total = 0.0;
    for (int first = 0; first < count; first += STRETCH) {
        load(first);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) total += expected[i];
    }
    total = warp_sum(total);
    const double even = (total > 0.0 ? EVEN_SHARE : 1.0) / count;
    const double per_size = total > 0.0 ? (1.0 - EVEN_SHARE) / total : 0.0;
    const int in_group = batch_head % p.num_heads % p.group;
    const int64_t number = (int64_t(run.begin) / p.stride) ^ (int64_t(in_group) << 32);
    double left = double(mixed(number) >> 11) * 0x1p-53;
    int chosen = count - 1;
    double weight = 0.0;
    for (int first = 0; first < count && weight == 0.0; first += STRETCH) {
        if (count > STRETCH) load(first);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int query = first + 32 * i + lane;
            const double own = query < count ? even + per_size * expected[i] : 0.0;
            double before = own;  // inclusive sum over the lanes
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const double other = __shfl_up_sync(~0u, before, step);
                if (lane >= step) before += other;
            }
            // Rounding may leave a rest after the last query.
            const bool last = query == count - 1;
            const uint32_t reached = __ballot_sync(~0u, query < count && (before > left || last));
            if (reached != 0) {
                chosen = first + 32 * i + __ffs(reached) - 1;
                weight = 1.0 / __shfl_sync(~0u, own, __ffs(reached) - 1);
                break;
            }
            left -= __shfl_sync(~0u, before, 31);
        }
    }
    if (lane == 0) p.weights[probe.index] = float(weight);
    take_query<D>(p, batch_head, probe, run.begin + chosen);
}

// All queries of a dense tail, whose runs have one position each. Grid: a warp for each slot and head, heads in y.
template <typename T, int D>
__device__ __forceinline__ void tail_queries(const ProbeParams& p) {
    const int slot = int(blockIdx.x) * (PROBE_THREADS / 32) + int(threadIdx.x) / 32;
    if (slot >= p.slots) return;
    take_query<D>(p, blockIdx.y, ProbeRow(p, blockIdx.y, slot), run_of(p, slot).begin);
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

// Positions of a block. It begins at a multiple of them, and they divide every segment length, so a block lies in one
// segment.
constexpr int CORRECTED = 128;
static_assert(PROBE_THREADS == 8 * 32 && CORRECTED == 128, "mirrored on the host");

// What the correction does to a row: row * keep + tail * add, or nothing. A probe gets its exact output instead.
struct alignas(16) RowChange {
    float keep, add;
    int is_corrected;
    int probe_slot;  // -1 for a query that is not a probe
};

// Grid (blocks for the positions of the group, batch * num_heads). A thread corrects eight columns of several rows, whose
// loads are in flight together, and one thread of each row makes its change.
template <typename T, int D>
__device__ __forceinline__ void probe_correction(const ProbeParams& p) {
    constexpr int VECTORS = D / 8, ROWS = PROBE_THREADS / VECTORS, STEPS = CORRECTED / ROWS;
    __shared__ RowChange changes[CORRECTED];
    const int batch_head = blockIdx.y, i = threadIdx.x % VECTORS, mine = threadIdx.x / VECTORS;
    const int offset = offset_of_call(p);
    const int begin = Positions(p, p.group_first).begin, end = Positions(p, p.group_first + p.group_segments - 1).end;
    const int first = (begin / CORRECTED + int(blockIdx.x)) * CORRECTED;
    const int segment = first / p.segment_len - p.first_segment;
    const int64_t unit = int64_t(batch_head) * p.segments + segment;
    const float scale = p.tail_scale[unit];
    const float4* tail = reinterpret_cast<const float4*>(p.tail_value + unit * D) + 2 * i;
    const float4 low = tail[0], high = tail[1];
    if (int(threadIdx.x) < CORRECTED) {
        const int position = first + threadIdx.x;
        RowChange change = {1.f, 0.f, 0, -1};
        if (position >= begin && position < end) {
            const float expected = expected_mass(p, call_row(p, batch_head, position - offset));
            // Of the run of position 0, as if it were in the segment.
            const int slot0 = (segment - p.group_first) * p.slots - Positions(p, segment).begin / p.stride;
            const int slot = slot0 + position / p.stride;
            const bool is_probe = p.positions[ProbeRow(p, batch_head, slot).index] == position;
            if (expected != SAW_ALL_KEYS) {
                const float mass = scale * expected;
                change.keep = 1.f / (1.f + mass);
                change.add = mass * change.keep;
                change.is_corrected = scale != 0.f;
                if (is_probe) change.probe_slot = slot;
            }
        }
        changes[threadIdx.x] = change;
    }
    uint4* const out = vector_at(p.out, out_element(p, batch_head, first - offset + mine), i);
    const int64_t step = ROWS * p.out_strides.seq / 8;
    uint4 words[STEPS];
    if (scale != 0.f) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int position = first + s * ROWS + mine;
            if (position >= begin && position < end) words[s] = out[s * step];
        }
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const RowChange change = changes[s * ROWS + mine];
        bool is_new = change.is_corrected;
        auto correct = [&](uint32_t word, float u0, float u1) {
            const float2 o = unpack<T>(word);
            return pack<T>(fmaf(o.x, change.keep, u0 * change.add), fmaf(o.y, change.keep, u1 * change.add));
        };
        uint4 row;
        if (is_new) {
            row = make_uint4(correct(words[s].x, low.x, low.y), correct(words[s].y, low.z, low.w),
                             correct(words[s].z, high.x, high.y), correct(words[s].w, high.z, high.w));
        }
        if (change.probe_slot >= 0) {
            // The tiles of the probes reach beyond a probe's position: keys there have no weight, but 0 * NaN is NaN. A
            // probe whose exact output is not finite keeps its own.
            const uint4 x = *vector_at(p.split.attn.out, ProbeRow(p, batch_head, change.probe_slot).element, i);
            const bool finite = all_finite<T>(x.x) && all_finite<T>(x.y) && all_finite<T>(x.z) && all_finite<T>(x.w);
            const uint32_t lanes = uint32_t((1ull << VECTORS) - 1) << (threadIdx.x % 32 / VECTORS * VECTORS);
            if (__all_sync(lanes, finite)) {
                row = x;
                is_new = true;
            }
        }
        if (is_new) out[s * step] = row;
    }
}

}  // namespace s2o

#define S2O_PROBE_KERNEL(name, threads, body)                                                                        \
    extern "C" { __constant__ s2o::LaunchInfo name##_launch = {threads, 0, 0, 0, s2o::OVERLAPS}; }                   \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ s2o::ProbeParams p) {         \
        s2o::overlap();                                                                                              \
        body(p);                                                                                                     \
    }

#define S2O_PROBE_KERNELS(suffix, ...)                                                                    \
    S2O_PROBE_KERNEL(s2o_probe_choice_##suffix, s2o::PROBE_THREADS, (s2o::probe_choice<__VA_ARGS__>))    \
    S2O_PROBE_KERNEL(s2o_tail_queries_##suffix, s2o::PROBE_THREADS, (s2o::tail_queries<__VA_ARGS__>))     \
    S2O_PROBE_KERNEL(s2o_probe_tails_##suffix, s2o::TAIL_THREADS, (s2o::probe_tails<__VA_ARGS__>)) \
    S2O_PROBE_KERNEL(s2o_probe_correction_##suffix, s2o::PROBE_THREADS, (s2o::probe_correction<__VA_ARGS__>))

S2O_PROBE_KERNEL(s2o_probe_units, s2o::PROBE_THREADS, s2o::probe_units)
S2O_PROBE_KERNELS(bf16_256, __nv_bfloat16, 256)
S2O_PROBE_KERNELS(bf16_128, __nv_bfloat16, 128)
S2O_PROBE_KERNELS(bf16_64, __nv_bfloat16, 64)
S2O_PROBE_KERNELS(f16_256, __half, 256)
S2O_PROBE_KERNELS(f16_128, __half, 128)
S2O_PROBE_KERNELS(f16_64, __half, 64)
