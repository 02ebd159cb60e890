// One row of kv_perm from its scores: a counting sort by one CTA, placed in shared memory a window at a time so that
// the row leaves in coalesced stores however scattered its order is.
//
// Buckets. Bucket 0 holds the front sink, 1 the scores that are not finite, the others the rest in descending order:
// half of them by the score's place between the row's extremes, the other half by u / sqrt(1 + u^2), where u is the
// score's distance from the row's centre over its spread, both from a sample. The first keeps the resolution at range /
// (buckets / 2) everywhere, the second fills the buckets evenly when outliers stretch the range. Inside a bucket tokens
// ascend, whatever order the atomics took.
#pragma once
#include <cstdint>

#include "ranking_network.cuh"
#include "ranking_params.cuh"

namespace s2o {

constexpr int SORT_THREADS = 1024;  // at most; any multiple of 32 that the buckets allow
constexpr int SORT_PADDING = 2 * NETWORK;
constexpr int SINK_BUCKET = 0, NOT_FINITE_BUCKET = 1, FIRST_BUCKET = 2;

__host__ __device__ constexpr int sort_shared_bytes(int buckets, int window) {
    return 4 * (buckets + 4 + window + SORT_PADDING);
}

// Reduction over the CTA by an associative `join`, the same on every run; all threads get the result.
template <typename V, class Join>
__device__ V join_threads(V value, V* partial, Join join) {
#pragma unroll
    for (int x = 16; x; x /= 2) value = join(value, __shfl_xor_sync(~0u, value, x));
    __syncthreads();  // the last call's partial results have been read
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = partial[0];
    for (int w = 1; w < int(blockDim.x) / 32; ++w) value = join(value, partial[w]);
    return value;
}

// Sum of `value` over the threads before this one, and over all.
struct Prefix {
    int before, total;
};
__device__ inline Prefix prefix_sum(int value, int* partial) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int sum = value;
#pragma unroll
    for (int x = 1; x < 32; x *= 2) {
        const int other = __shfl_up_sync(~0u, sum, x);
        if (lane >= x) sum += other;
    }
    __syncthreads();
    if (lane == 31) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    int warp_sum = lane < warps ? partial[lane] : 0;
#pragma unroll
    for (int x = 1; x < 32; x *= 2) {
        const int other = __shfl_up_sync(~0u, warp_sum, x);
        if (lane >= x) warp_sum += other;
    }
    const int warp = threadIdx.x / 32, before = __shfl_sync(~0u, warp_sum, max(warp - 1, 0));
    return {(warp ? before : 0) + sum - value, __shfl_sync(~0u, warp_sum, 31)};
}

// The row's scores, and the map from score to bucket.
struct ScoreRow {
    uint16_t* codes;
    const float2* ranges;
    int length, front_sink, buckets;
    float centre, per_spread, highest, per_range;

    __device__ __forceinline__ static float code_value(uint32_t word, bool high) {
        // The bits below the code are set to their middle.
        return __uint_as_float(__byte_perm(word, 0x00004080, high ? 0x5324 : 0x5104));
    }

    // Buckets of the eight scores of vector `v`, packed as they were.
    __device__ __forceinline__ uint4 buckets_of(uint4 codes, float2 range, int v) const {
        const float factor = fabsf(range.x) * per_spread, offset = (range.y - centre) * per_spread;
        // Each half takes `share` buckets.
        const float share = 0.5f * (buckets - FIRST_BUCKET - 2), start = FIRST_BUCKET + 0.5f + 0.5f * share;
        const float slope = -share * per_range * fabsf(range.x);
        const float intercept = fmaf(share * per_range, highest - range.y, start);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        uint32_t bucket[8], packed[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float code = code_value(words[i / 2], i % 2), u = fmaf(code, factor, offset);
            float reciprocal;
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(fmaf(u, u, 1.f)));
            const float place = fmaf(u * reciprocal, -0.5f * share, fmaf(code, slope, intercept));
            // 2^23 puts the rounded bucket into the low bits.
            bucket[i] = min(__float_as_uint(place + 8388608.f) - 0x4b000000u, uint32_t(buckets - 1));
        }
        const bool not_finite = __float_as_uint(range.x) >> 31;
        if (not_finite || v * 8 < front_sink) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if ((words[i / 2] >> (i % 2 * 16) & 0xffff) == SCORE_NOT_FINITE) bucket[i] = NOT_FINITE_BUCKET;
                if (v * 8 + i < front_sink) bucket[i] = SINK_BUCKET;
            }
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) packed[w] = bucket[2 * w] | bucket[2 * w + 1] << 16;
        return make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }

    // Centre and spread from a sample of the scores and the row's extremes.
    __device__ void fit(float* partial) {
        auto add = [](float a, float b) { return a + b; };
        float low = INFINITY, high = -INFINITY;
        for (int i = threadIdx.x; i < length / SCORE_BLOCK; i += blockDim.x) {
            const float2 range = ranges[i];
            const float start = fmaf(SCORE_CODE_START, fabsf(range.x), range.y);
            low = fminf(low, start);
            high = fmaxf(high, fmaf(SCORE_CODE_SPAN, fabsf(range.x), start));
        }
        low = join_threads(low, partial, [](float a, float b) { return fminf(a, b); });
        high = join_threads(high, partial, [](float a, float b) { return fmaxf(a, b); });
        constexpr int SAMPLES = 2;  // of a thread
        float sample[SAMPLES], sum = 0, count = 0;
#pragma unroll
        for (int s = 0; s < SAMPLES; ++s) {
            const int i = int(int64_t(threadIdx.x * SAMPLES + s) * length / int(blockDim.x * SAMPLES));
            const uint32_t code = codes[i];
            const float2 range = ranges[i / SCORE_BLOCK];
            sample[s] = code == SCORE_NOT_FINITE ? NAN : fmaf(code_value(code, false), fabsf(range.x), range.y);
            if (fabsf(sample[s]) < INFINITY) {
                sum += sample[s];
                ++count;
            }
        }
        count = fmaxf(join_threads(count, partial, add), 1.f);
        centre = join_threads(sum, partial, add) / count;
        // The square of the mean root distance: a few far outliers hardly move it.
        float root = 0;
#pragma unroll
        for (int s = 0; s < SAMPLES; ++s) {
            if (fabsf(sample[s]) < INFINITY) root += sqrtf(fabsf(sample[s] - centre));
        }
        root = join_threads(root, partial, add) / count;
        const float spread = fmaxf(1.85f * root * root, 1e-6f * (high - low));
        per_spread = spread > 1e-30f && spread < INFINITY ? 1.f / spread : 0.f;
        if (!(fabsf(centre) < INFINITY)) centre = 0.f;
        const bool bounded = high - low > 1e-30f && high - low < INFINITY;
        highest = bounded ? high : 0.f;
        per_range = bounded ? 1.f / (high - low) : 0.f;
    }
};

// Calls f(v, bucket ids) for the eight-id vectors of this thread, loads running ahead.
template <class F>
__device__ __forceinline__ void for_each_vector(const uint16_t* ids, int length, F f) {
    constexpr int AHEAD = 2;
    const uint4* vectors = reinterpret_cast<const uint4*>(ids);
    for (int first = threadIdx.x; first < length / 8; first += AHEAD * blockDim.x) {
        uint4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int v = first + i * int(blockDim.x);
            if (v < length / 8) x[i] = vectors[v];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int v = first + i * int(blockDim.x);
            if (v < length / 8) f(v, x[i]);
        }
    }
}

__device__ __forceinline__ int id_of(uint4 ids, int i) {
    const uint32_t words[4] = {ids.x, ids.y, ids.z, ids.w};
    return i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
}

// A bucket of any size: its tokens, found in ascending order.
__device__ inline void emit_bucket(const uint16_t* ids, int length, int bucket, int32_t* out, int* partial) {
    const uint4* vectors = reinterpret_cast<const uint4*>(ids);
    for (int first = 0; first < length / 8; first += blockDim.x) {
        const int v = first + threadIdx.x;
        const uint4 x = v < length / 8 ? vectors[v] : make_uint4(~0u, ~0u, ~0u, ~0u);
        int count = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) count += id_of(x, i) == bucket;
        const Prefix prefix = prefix_sum(count, partial);
        int32_t* place = out + prefix.before;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (id_of(x, i) == bucket) *place++ = v * 8 + i;
        }
        out += prefix.total;
    }
}

// Grid (batch * num_heads, num_segments), any multiple of 32 up to SORT_THREADS threads,
// sort_shared_bytes(sort_buckets, sort_window) dynamic shared memory (opt in above 48 KiB).
__device__ __forceinline__ void sort_row(const RankingParams& p) {
    extern __shared__ __align__(128) uint32_t sort_shared[];
    __shared__ int partial[32];
    __shared__ int largest_in_window;
    uint32_t* starts = sort_shared;  // counts first; one more than the buckets
    uint32_t* entries = sort_shared + p.sort_buckets + 4;
    // Longest rows first.
    const int n = p.first_segment + p.num_segments - 1 - int(blockIdx.y), length = n * p.segment_len;
    if (length == 0) return;
    const int64_t begin = blockIdx.x * p.kv_perm_head_stride + prefix_row(p, n);
    int32_t* out = p.kv_perm + begin;
    ScoreRow row{p.scores + begin, reinterpret_cast<const float2*>(p.score_ranges) + begin / SCORE_BLOCK,
                 length, p.front_sink, p.sort_buckets, 0.f, 0.f, 0.f, 0.f};

    for (int i = threadIdx.x; i < p.sort_buckets; i += blockDim.x) starts[i] = 0;
    row.fit(reinterpret_cast<float*>(partial));
    for_each_vector(row.codes, length, [&](int v, uint4 codes) {
        const uint4 ids = row.buckets_of(codes, row.ranges[v / (SCORE_BLOCK / 8)], v);
        // The windows below read buckets, not scores.
        reinterpret_cast<uint4*>(row.codes)[v] = ids;
#pragma unroll
        for (int i = 0; i < 8; ++i) atomicAdd(starts + id_of(ids, i), 1u);
    });
    __syncthreads();

    uint32_t largest = 0;
    {
        const int share = p.sort_buckets / blockDim.x;
        uint4* mine = reinterpret_cast<uint4*>(starts + threadIdx.x * share);
        uint32_t sum = 0;
        for (int i = 0; i < share / 4; ++i) {
            const uint4 c = mine[i];
            sum += c.x + c.y + c.z + c.w;
            largest = max(max(largest, max(c.x, c.y)), max(c.z, c.w));
        }
        uint32_t before = prefix_sum(sum, partial).before;
        for (int i = 0; i < share / 4; ++i) {
            const uint4 c = mine[i];
            const uint4 s = make_uint4(before, before + c.x, before + c.x + c.y, before + c.x + c.y + c.z);
            mine[i] = s;
            before = s.w + c.w;
        }
        if (threadIdx.x == 0) starts[p.sort_buckets] = length;
        largest = join_threads(int(largest), partial, [](int a, int b) { return max(a, b); });
    }

    const int token_bits = 32 - __clz(length - 1);
    const uint32_t token_mask = (1u << token_bits) - 1;
    const int widest = 1 << min(32 - token_bits, 20);
    for (int first = 0; first < p.sort_buckets;) {
        const int base = starts[first];
        if (base == length) break;
        // The last bucket boundary that the window reaches.
        int end = first, beyond = min(first + widest, p.sort_buckets) + 1;
        while (beyond - end > 1) {
            const int middle = (end + beyond) / 2;
            (int(starts[middle]) - base <= p.sort_window ? end : beyond) = middle;
        }
        if (end == first) {
            emit_bucket(row.codes, length, first, out + base, partial);
            ++first;
            continue;
        }
        const int count = int(starts[end]) - base, width = end - first;
        uint32_t largest_here = largest;
        if (largest > 4 * NETWORK && count > 0) {
            if (threadIdx.x == 0) largest_in_window = 0;
            __syncthreads();
            int m = 0;
            for (int i = first + threadIdx.x; i < end; i += blockDim.x) m = max(m, int(starts[i + 1] - starts[i]));
            atomicMax(&largest_in_window, m);
            __syncthreads();
            largest_here = largest_in_window;
        }
        if (threadIdx.x < SORT_PADDING) entries[spread_banks(count + threadIdx.x)] = ~0u;
        __syncthreads();
        for_each_vector(row.codes, length, [&](int v, uint4 ids) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int id = id_of(ids, i);
                if (uint32_t(id - first) < uint32_t(width)) {
                    const int place = atomicAdd(starts + id, 1u) - base;
                    entries[spread_banks(place)] = uint32_t(id - first) << token_bits | (v * 8 + i);
                }
            }
        });
        __syncthreads();
        finish_order(entries, count, largest_here);
        for (int i = threadIdx.x; i < count; i += blockDim.x) out[base + i] = entries[spread_banks(i)] & token_mask;
        __syncthreads();
        first = end;
    }
}

}  // namespace s2o
