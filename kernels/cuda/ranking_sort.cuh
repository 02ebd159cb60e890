// Sorts one row of scores into kv_perm: a counting sort by one CTA, which places entries in shared memory one window at
// a time so that stores of the row are coalesced. If rows are few, several CTAs take turns with the windows of one row; each
// of them counts the whole row. Tokens ascend inside a bucket, so the order of the atomics does not matter and the result is
// the same on every run. Each window reads the whole row, so windows are made for the best keys only; the others, which few
// query tiles reach, follow in the order of their tokens. The number of sorted keys depends on the row alone.
#pragma once
#include <cstdint>

#include "ranking_buckets.cuh"
#include "ranking_network.cuh"
#include "ranking_params.cuh"
#include "shared_address.cuh"

namespace s2o {

constexpr int SORT_THREADS = 1024;  // at most
constexpr int WINDOW_LEAD = 128;    // alignment of a window's start in the row
constexpr int SPARE_COUNTERS = 32;  // twice: for the end of the last bucket, and for keys of other buckets
constexpr int BIG_BUCKET = 98;      // larger buckets are sorted by one warp
constexpr int HUGE_BUCKET = 512;    // larger: by the whole CTA
constexpr int GIANT_BUCKET = 4096;  // larger: not sorted, collected from the row in ascending order

// Windows start at multiples of WINDOW_LEAD, the network reads 2 * NETWORK past the last entry, and the list of big
// buckets has one word per 32 entries.
__host__ __device__ constexpr int sort_shared_bytes(int buckets, int window) {
    return 4 * (buckets + 2 * SPARE_COUNTERS + WINDOW_LEAD + window + 2 * NETWORK + window / 32);
}

static_assert(LEAD_BUCKET == 1, "its count is the second of the first vector");
static_assert(sort_shared_bytes(8192, 64) == 4 * (8192 + 64 + 2 + 64 + 128 + 32) && SORT_THREADS == 1024,
              "mirrored on the host");

struct SortShared {
    FitShared fit;
    int partial[32];
    int largest, first_giant, big, huge;
};

// Sum of `value` over the threads before this thread, and over all threads.
struct Prefix {
    int before, total;
};
__device__ inline Prefix prefix_sum(int value, int* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int sum = value;
#pragma unroll
    for (int x = 1; x < 32; x *= 2) {
        const int other = __shfl_up_sync(~0u, sum, x);
        if (lane >= x) sum += other;
    }
    __syncthreads();  // the last call's partial sums have been read
    if (lane == 31) partial[warp] = sum;
    __syncthreads();
    const int others = lane < warps ? partial[lane] : 0;
    return {__reduce_add_sync(~0u, lane < warp ? others : 0) + sum - value, __reduce_add_sync(~0u, others)};
}

// Calls f(v, vector v) for this thread's vectors of eight, while the next vectors load.
template <class F>
__device__ __forceinline__ void for_each_vector(const uint16_t* row, int length, F f) {
    const uint4* vectors = reinterpret_cast<const uint4*>(row);
    const int count = length / 8, step = blockDim.x;
    auto load = [&](int v) { return v < count ? vectors[v] : make_uint4(0, 0, 0, 0); };
    uint4 even = load(threadIdx.x), odd = load(threadIdx.x + step);
    for (int v = threadIdx.x; v < count; v += 2 * step) {
        f(v, even);
        even = load(v + 2 * step);
        if (v + step < count) f(v + step, odd);
        odd = load(v + 3 * step);
    }
}

// Buckets are kept as the byte offsets of their counters.
__device__ __forceinline__ uint32_t offset_of(uint4 ids, int i) {
    const uint32_t words[4] = {ids.x, ids.y, ids.z, ids.w};
    return i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
}

// Writes the tokens of a bucket of any size in ascending order.
__device__ inline void emit_bucket(const uint16_t* ids, int length, uint32_t bucket, int32_t* out, int* partial) {
    const uint4* vectors = reinterpret_cast<const uint4*>(ids);
    for (int first = 0; first < length / 8; first += blockDim.x) {
        const int v = first + threadIdx.x;
        const uint4 x = v < length / 8 ? vectors[v] : make_uint4(~0u, ~0u, ~0u, ~0u);
        int count = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) count += offset_of(x, i) == 4 * bucket;
        const Prefix prefix = prefix_sum(count, partial);
        int32_t* place = out + prefix.before;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (offset_of(x, i) == 4 * bucket) *place++ = v * 8 + i;
        }
        out += prefix.total;
    }
}

// Writes the tokens of the buckets from `first` on in ascending order. `first` > 0, because vectors past the end read as
// bucket 0. The tokens are collected in `staged`, so that stores are coalesced; it has `room` entries, at least the row's
// length or 8 for each thread.
__device__ inline void emit_rest(const uint16_t* ids, int length, uint32_t first, int32_t* out, uint32_t* staged,
                                 int room, int* partial) {
    const uint4* vectors = reinterpret_cast<const uint4*>(ids);
    const int count = length / 8;
    auto load = [&](int v) { return v < count ? vectors[v] : make_uint4(0, 0, 0, 0); };
    auto flush = [&](int filled) {
        // Evicted first, so that the rows that CTAs still read stay in L2.
        for (int i = threadIdx.x; i < filled; i += blockDim.x) __stcs(out + i, int32_t(staged[i]));
        out += filled;
    };
    int filled = 0;
    uint4 next = load(threadIdx.x);
    for (int v = threadIdx.x; v - int(threadIdx.x) < count; v += blockDim.x) {
        const uint4 x = next;
        next = load(v + blockDim.x);
        int kept = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) kept += offset_of(x, i) >= 4 * first;
        const Prefix prefix = prefix_sum(kept, partial);
        if (filled + prefix.total > room) {
            flush(filled);
            filled = 0;
            __syncthreads();
        }
        uint32_t* place = staged + filled + prefix.before;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (offset_of(x, i) >= 4 * first) *place++ = v * 8 + i;
        }
        filled += prefix.total;
    }
    __syncthreads();
    flush(filled);
}

// Turns the bucket counts into starts and returns the largest count, without that of the front sink and the recent keys if it
// is `lead`. All threads call it after a barrier.
__device__ __forceinline__ int counts_to_starts(uint32_t* counts, int buckets, int length, int lead, SortShared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = buckets / (4 * int(blockDim.x));
    uint4* mine = reinterpret_cast<uint4*>(counts) + warp * rows * 32 + lane;
    uint32_t sum = 0, largest = 0;
    for (int r = 0; r < rows; ++r) {
        uint4 c = mine[r * 32];
        sum += c.x + c.y + c.z + c.w;
        if (r == 0 && threadIdx.x == 0 && c.y == lead) c.y = 0;
        largest = max(max(largest, max(c.x, c.y)), max(c.z, c.w));
    }
    sum = __reduce_add_sync(~0u, sum);
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) {
        shared.partial[warp] = sum;
        atomicMax(&shared.largest, int(largest));
    }
    __syncthreads();
    uint32_t before = __reduce_add_sync(~0u, lane < warp ? shared.partial[lane] : 0);
    for (int r = 0; r < rows; ++r) {
        const uint4 c = mine[r * 32];
        const uint32_t all = c.x + c.y + c.z + c.w;
        uint32_t through = all;
#pragma unroll
        for (int x = 1; x < 32; x *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, through, x);
            if (lane >= x) through += other;
        }
        const uint32_t start = before + through - all;
        mine[r * 32] = make_uint4(start, start + c.x, start + c.x + c.y, start + c.x + c.y + c.z);
        before += __shfl_sync(~0u, through, 31);
    }
    if (threadIdx.x == 0) counts[buckets] = length;
    __syncthreads();
    return shared.largest;
}

// The last bucket boundary up to `limit` that is at most `reach` entries past the boundary of `first`.
__device__ __forceinline__ int last_boundary(const uint32_t* starts, int first, int limit, int reach) {
    const uint32_t most = starts[first] + reach;
    int end = first;
    for (int stride = (limit - first + 31) / 32; stride > 0; stride = (stride + 30) / 32) {
        const int probe = end + (int(threadIdx.x % 32) + 1) * stride;
        end += __popc(__ballot_sync(~0u, probe <= limit && starts[min(probe, limit)] <= most)) * stride;
    }
    return end;
}

// The buckets first .. first + width of a window, and the constants of its loop over the row.
struct Window {
    uint32_t first, width;
    uint32_t per_bucket;  // 2^(bits of a token)
    int begin;            // in the row, a multiple of WINDOW_LEAD; the window's first entry may be later
    int spare;            // first of 32 counters for keys of other buckets

    // Entries are (bucket in the window, token), so that they sort as the row does.
    __device__ __forceinline__ void place(const uint16_t* ids, int length, uint32_t* starts, uint32_t* entries) const {
        const uint32_t counters = smem_address(starts);
        // Keys of other buckets go to a spare counter, one bank per lane: a branch around the atomic costs more.
        const uint32_t elsewhere = counters + 4 * (spare + threadIdx.x % 32);
        // WINDOW_LEAD is a multiple of the bank pattern, so spread_banks can take a place in the row.
        const uint32_t target = smem_address(entries) - 4 * begin;
        for_each_vector(ids, length, [&](int v, uint4 x) {
            uint32_t place[8];
            // Atomics before stores: the store of one key must not delay the atomics of the next key.
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t offset = offset_of(x, i);
                const uint32_t counter = offset - 4 * first < 4 * width ? counters + offset : elsewhere;
                asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(place[i]) : "r"(counter) : "memory");
            }
            const uint32_t token = v * 8 - first * per_bucket;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t offset = offset_of(x, i);
                asm volatile("{.reg .pred inside; setp.lt.u32 inside, %0, %1; @inside st.shared.u32 [%2], %3;}" ::"r"(
                                 offset - 4 * first),
                             "r"(4 * width), "r"(target + 4 * spread_banks(place[i])),
                             "r"(offset * (per_bucket / 4) + token + i)
                             : "memory");
            }
        });
    }
};

// Grid (batch * num_heads, num_segments, CTAs of a row), a power of two of threads up to SORT_THREADS that the buckets allow,
// sort_shared_bytes(sort_buckets, sort_window) dynamic shared memory (opt in above 48 KiB).
__device__ __forceinline__ void sort_row(const RankingParams& p) {
    extern __shared__ __align__(128) uint32_t sort_shared[];
    __shared__ SortShared shared;
    uint32_t* starts = sort_shared;  // first the counts, then the starts; one more than the buckets
    uint32_t* entries = sort_shared + p.sort_buckets + 2 * SPARE_COUNTERS;
    // Big buckets are listed from its start, huge buckets from its end.
    uint32_t* list = entries + WINDOW_LEAD + p.sort_window + 2 * NETWORK;
    const int list_room = p.sort_window / 32;
    // Longest rows first.
    const int n = p.first_segment + p.num_segments - 1 - int(blockIdx.y), length = n * p.segment_len;
    if (length == 0) return;
    const int64_t row_begin = blockIdx.x * p.kv_perm_head_stride + prefix_row(p, n);
    int32_t* out = p.kv_perm + row_begin;
    uint16_t* const ids = p.buckets + row_begin;
    ScoreRow row{p.scores + row_begin, reinterpret_cast<const float2*>(p.score_ranges) + row_begin / SCORE_BLOCK,
                 length, p.front_sink, length - p.recent, p.sort_buckets, 0.f, 0.f, 0.f, 0.f};

    for (int i = threadIdx.x; i < p.sort_buckets / 4; i += blockDim.x) {
        reinterpret_cast<uint4*>(starts)[i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) shared.largest = 0;
    row.fit(shared.fit);
    for_each_vector(row.codes, length, [&](int v, uint4 codes) {
        uint32_t bucket[8];
        row.buckets_of(codes, row.ranges[v / (SCORE_BLOCK / 8)], v, bucket);
        // The windows below read buckets, not scores. All CTAs of a row write the same.
        auto pack = [&](int i) { return 4 * (bucket[i] | bucket[i + 1] << 16); };
        reinterpret_cast<uint4*>(ids)[v] = make_uint4(pack(0), pack(2), pack(4), pack(6));
#pragma unroll
        for (int i = 0; i < 8; ++i) atomicAdd(starts + bucket[i], 1u);
    });
    __syncthreads();
    const int lead_keys = row.lead_keys();
    const int largest = counts_to_starts(starts, p.sort_buckets, length, lead_keys, shared);
    const bool is_lead_known = int(starts[LEAD_BUCKET + 1] - starts[LEAD_BUCKET]) == lead_keys;

    const uint32_t token_bits = 32 - __clz(length - 1), token_mask = (1u << token_bits) - 1;
    const int widest = 1 << min(32 - token_bits, 20u);
    // The first buckets that hold `wanted` keys are sorted. Window::place turns the starts of its buckets into their ends, so
    // this comes first.
    const int wanted = min(length, p.sorted_keys);
    const int end_of_sorted = last_boundary(starts, 0, p.sort_buckets, wanted - 1) + 1;
    // Windows of equal size for the CTAs of a row: each may end up to one bucket before its reach.
    const int reach = min(p.sort_window, int(starts[end_of_sorted]) / int(gridDim.z) + largest);
    for (int first = 0, turn = 0; first < p.sort_buckets; ++turn) {
        const int base = starts[first];
        if (base == length) break;
        const bool is_mine = turn % gridDim.z == blockIdx.z;
        if (first == end_of_sorted) {
            if (is_mine) emit_rest(ids, length, first, out + base, entries, p.sort_window, shared.partial);
            break;
        }
        int end = last_boundary(starts, first, min(first + widest, end_of_sorted), reach);
        if (largest > BIG_BUCKET) {
            if (threadIdx.x == 0) {
                shared.first_giant = end;
                shared.big = shared.huge = 0;
            }
            __syncthreads();
            for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
                if (starts[i + 1] - starts[i] > GIANT_BUCKET) atomicMin(&shared.first_giant, i);
            }
            __syncthreads();
            end = shared.first_giant;
            for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
                const uint32_t start = starts[i], count = starts[i + 1] - start, at = start - (base & -WINDOW_LEAD);
                if (count > HUGE_BUCKET) list[list_room - 1 - atomicAdd(&shared.huge, 1)] = at << 16 | count;
                else if (count > BIG_BUCKET) list[atomicAdd(&shared.big, 1)] = at << 16 | count;
            }
        }
        if (end == first || !is_mine) {
            if (is_mine) emit_bucket(ids, length, first, out + base, shared.partial);
            first = max(end, first + 1);
            __syncthreads();
            continue;
        }
        const int begin = base & -WINDOW_LEAD, lead = base - begin, count = int(starts[end]) - begin;
        if (threadIdx.x < lead) entries[spread_banks(threadIdx.x)] = 0;
        if (threadIdx.x < 2 * NETWORK) entries[spread_banks(count + threadIdx.x)] = ~0u;
        __syncthreads();
        const Window window{uint32_t(first), uint32_t(end - first), token_mask + 1, begin,
                            p.sort_buckets + SPARE_COUNTERS};
        window.place(ids, length, starts, entries);
        __syncthreads();
        if (is_lead_known && first <= LEAD_BUCKET && LEAD_BUCKET < end) {
            // In order without the network, for which this bucket would be by far the largest.
            const int at = int(starts[LEAD_BUCKET]) - lead_keys - begin;
            for (int i = threadIdx.x; i < lead_keys; i += blockDim.x) {
                entries[spread_banks(at + i)] = (LEAD_BUCKET - first) * (token_mask + 1) + row.lead_key(i);
            }
            __syncthreads();
        }
        if (largest > BIG_BUCKET) {
            const int warps = blockDim.x / 32;
            for (int i = threadIdx.x / 32; i < shared.big; i += warps) {
                bitonic_sort(entries, list[i] >> 16, list[i] & 0xffff, threadIdx.x % 32, 32, [] { __syncwarp(); });
            }
            for (int i = 0; i < shared.huge; ++i) {
                const uint32_t bucket = list[list_room - 1 - i];
                bitonic_sort(entries, bucket >> 16, bucket & 0xffff, threadIdx.x, blockDim.x, [] { __syncthreads(); });
            }
            __syncthreads();
        }
        network_rounds(entries, count, min(largest, BIG_BUCKET));
        // Whole vectors, then the row's pieces of the vectors that it shares with neighbouring rows or windows.
        const int inner = (lead + 3) / 4 * 4, outer = count / 4 * 4;
#pragma unroll 4
        for (int i = inner + 4 * threadIdx.x; i < outer; i += 4 * blockDim.x) {
            const uint4 x = *reinterpret_cast<uint4*>(entries + spread_banks(i));
            // Evicted first, as in emit_rest.
            __stcs(reinterpret_cast<uint4*>(out + begin + i),
                   make_uint4(x.x & token_mask, x.y & token_mask, x.z & token_mask, x.w & token_mask));
        }
        if (threadIdx.x < 8) {
            const int i = threadIdx.x < 4 ? inner - 1 - int(threadIdx.x) : outer + int(threadIdx.x) - 4;
            if (i >= lead && i < count && (i < inner || i >= outer))
                out[begin + i] = entries[spread_banks(i)] & token_mask;
        }
        __syncthreads();
        first = end;
    }
}

}  // namespace s2o
