// A ranking problem on the device, the plan of its launches, and the launches.
#pragma once
#include <cmath>

#include "../cuda/ranking.cu"
#include "device.cuh"

using s2o::RankingParams;

constexpr int64_t WORKSPACE_LIMIT = 256ll << 20;
constexpr int SHARED_LIMIT = 227 * 1024 - 2048;  // dynamic; the rest is the sort's static shared memory

enum class Data { Normal, Offset, Tiny, Huge, Skewed, Constant, TwoValued, NotFinite };
inline const char* name_of(Data data) {
    const char* names[] = {"normal", "offset", "tiny", "huge", "skewed", "constant", "two-valued", "not-finite"};
    return names[int(data)];
}

// Element d of a token; the data kinds act on keys, NotFinite on both.
template <typename T>
__global__ void fill(T* x, int64_t n, int D, int heads, uint64_t seed, Data data, bool key) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t token = i / D;
        float v = normal(seed * 0x10000000000ull + i);
        const uint32_t luck = mix(seed * 77 + token);
        if (!key) v += 0.3f * normal(seed * 31 + i % (D * heads));  // a mean that is not zero
        if (data == Data::NotFinite && luck % 97 == 0) {
            v = luck % 5 < 2 ? NAN : luck % 5 == 2 ? -INFINITY : i % 3 ? v : INFINITY;
        }
        if (data == Data::Tiny) v *= 1e-4f;
        if (data == Data::Huge) v *= key ? 200.f : 50.f;
        if (key) {
            if (data == Data::Offset) v += i % D == 5 ? 60.f : 4.f;
            if (data == Data::Skewed) v *= luck % 100 == 0 ? 30.f : luck % 7 == 0 ? 0.05f : 1.f;
            if (data == Data::Constant) v = normal(i % D);
            if (data == Data::TwoValued) v = luck % 3 ? normal(i % D) : normal(i % D + 1000);
        }
        x[i] = T(v);
    }
}

struct Case {
    int batch, heads, kv_heads, q_len, k_len, dim, segment_len;
    int layout = 0, front_sink = 4;
    float c = 0.35f;
    Data data = Data::Normal;
    bool f16 = false, queries = false;
    int dense_tail = 0, splits = 0, buckets = 0, window = 0, threads = 0, share = 0;  // 0: the plan's value
    int64_t workspace = WORKSPACE_LIMIT;
};

struct SortPlan {
    int threads, buckets, window;
};
inline SortPlan plan_sort(const Case& c, int longest) {
    SortPlan s{longest > 16384 ? 1024 : 512, longest > 16384 ? 16384 : 8192, 0};
    if (c.threads) s.threads = c.threads;
    if (c.buckets) s.buckets = c.buckets;
    const int fits = (SHARED_LIMIT - s2o::sort_shared_bytes(s.buckets, 0)) / 132 * 32;
    s.window = std::max(64, std::min(longest, c.window ? c.window : fits));
    return s;
}

struct Group {
    int first, count;        // segments
    int kv_first, kv_count;  // KV heads
    int64_t keys;            // of a head
};
// Bytes of the scores and kv_perm of rows with `keys` keys in total.
inline int64_t row_bytes(int64_t keys) { return keys * (4 + 2) + keys / s2o::SCORE_BLOCK * 8; }

inline std::vector<Group> plan_groups(const Case& c) {
    const int first = (c.k_len - c.q_len) / c.segment_len, end = (c.k_len + c.segment_len - 1) / c.segment_len;
    const int64_t heads = int64_t(c.batch) * c.heads / c.kv_heads;
    const int64_t limit = c.workspace - 6 * c.dim * int64_t(c.batch) * c.heads * (end - first);
    auto keys_of = [&](int from, int to) {
        int64_t keys = 0;
        for (int n = from; n < to; ++n) keys += int64_t(n) * c.segment_len;
        return keys;
    };
    const int64_t all = keys_of(first, end);
    std::vector<Group> groups;
    if (row_bytes(heads * all) <= limit) {
        const int fit = int(std::min<int64_t>(c.kv_heads, limit / std::max<int64_t>(1, row_bytes(heads * all))));
        const int launches = (c.kv_heads + fit - 1) / fit;
        for (int i = 0, kv = 0; i < launches; ++i) {
            const int next = c.kv_heads * (i + 1) / launches;
            groups.push_back({first, end - first, kv, next - kv, all});
            kv = next;
        }
        return groups;
    }
    for (int kv = 0; kv < c.kv_heads; ++kv) {
        for (int n = first; n < end;) {
            int to = n + 1;
            while (to < end && row_bytes(heads * keys_of(n, to + 1)) <= limit) ++to;
            groups.push_back({n, to - n, kv, 1, keys_of(n, to)});
            n = to;
        }
    }
    return groups;
}

template <typename T, int D>
struct Ranking {
    Case c;
    Tensor<T> q, k;
    Buffer<int32_t> kv_perm, q_perm;
    Buffer<uint16_t> scores_of_keys, coefficients;
    Buffer<float> score_ranges, partial_moments, key_guide;
    Buffer<uint32_t> arrivals;
    RankingParams all{}, p{};  // of the whole ranking, and of the current group
    std::vector<Group> groups;
    int splits = 1, sms = 0;

    explicit Ranking(const Case& c) : c(c) {
        CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        q.make(c.batch, c.q_len, c.heads, D, c.layout);
        k.make(c.batch, c.k_len, c.kv_heads, D, c.layout);
        fill<<<2048, 256>>>(q.data, q.count, D, c.heads, 1, c.data, false);
        fill<<<2048, 256>>>(k.data, k.count, D, c.kv_heads, 2, c.data, true);
        groups = plan_groups(c);
        all.first_segment = (c.k_len - c.q_len) / c.segment_len;
        all.num_segments = (c.k_len + c.segment_len - 1) / c.segment_len - all.first_segment;
        const int64_t rows = int64_t(c.batch) * c.heads * all.num_segments;
        // Four CTAs per multiprocessor, with at least 128 rows each.
        splits = int(std::max<int64_t>(1, std::min<int64_t>((4 * sms + rows - 1) / rows, c.segment_len / 128)));
        if (c.splits) splits = c.splits;
        int64_t keys = 1;
        for (auto& g : groups) keys = std::max(keys, g.keys * c.batch * c.heads / c.kv_heads * g.kv_count);
        kv_perm.make(keys);
        scores_of_keys.make(keys);
        score_ranges.make((keys / s2o::SCORE_BLOCK + 1) * 2);
        coefficients.make(rows * 3 * D);
        partial_moments.make(rows * splits * (2 * D + 1));
        arrivals.make(rows);
        arrivals.fill(0);
        q_perm.make(int64_t(c.batch) * c.heads * c.q_len);
        key_guide.make(c.batch * c.kv_heads * D);
        all.q = q.data;
        all.k = k.data;
        all.kv_perm = kv_perm;
        all.coefficients = coefficients;
        all.partial_moments = partial_moments;
        all.arrivals = arrivals;
        all.scores = scores_of_keys;
        all.score_ranges = score_ranges;
        all.q_perm = q_perm;
        all.key_guide = key_guide;
        all.q_strides = q.strides;
        all.k_strides = k.strides;
        all.coefficient_head_stride = int64_t(all.num_segments) * 3 * D;
        all.coefficient_batch_stride = c.heads * all.coefficient_head_stride;
        all.coefficient_segment = all.first_segment;
        all.batch = c.batch;
        all.num_heads = c.heads;
        all.num_kv_heads = c.kv_heads;
        all.q_len = c.q_len;
        all.k_len = c.k_len;
        all.segment_len = c.segment_len;
        all.front_sink = c.front_sink;
        all.ranked_rows = c.q_len - c.dense_tail;
        all.softmax_scale = 1.f / sqrtf(float(D));
        all.second_cumulant = c.c;
        p = all;
        auto allow_shared = [](auto kernel, int bytes) {
            CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        };
        allow_shared(s2o_sort, SHARED_LIMIT);
        allow_shared(scores_kernel(), s2o::score_shared_bytes<D>());
        allow_shared(order_kernel(), s2o::query_order_shared_bytes(16384));
    }
    using Kernel = void (*)(RankingParams);
    static Kernel pick(Kernel bf128, Kernel bf64, Kernel f128, Kernel f64) {
        return std::is_same_v<T, __half> ? (D == 128 ? f128 : f64) : (D == 128 ? bf128 : bf64);
    }
#define PICK(kernel) pick(kernel##_bf16_128, kernel##_bf16_64, kernel##_f16_128, kernel##_f16_64)
    static Kernel moments_kernel() { return PICK(s2o_moments); }
    static Kernel scores_kernel() { return PICK(s2o_scores); }
    static Kernel guide_kernel() { return PICK(s2o_key_guide); }
    static Kernel order_kernel() { return PICK(s2o_query_order); }

    void moments() {
        moments_kernel()<<<dim3(c.heads, all.num_segments, c.batch * splits), s2o::MOMENT_THREADS>>>(all);
    }
    void set_group(const Group& g) {
        const int group = c.heads / c.kv_heads;
        p = all;
        p.first_segment = g.first;
        p.num_segments = g.count;
        p.num_heads = g.kv_count * group;
        p.num_kv_heads = g.kv_count;
        p.q = q.data + g.kv_first * group * q.strides.head;
        p.k = k.data + g.kv_first * k.strides.head;
        p.coefficients = coefficients + g.kv_first * group * all.coefficient_head_stride;
        p.kv_perm_head_stride = g.keys;
        const SortPlan s = plan_sort(c, (g.first + g.count - 1) * c.segment_len);
        p.sort_buckets = s.buckets;
        p.sort_window = s.window;
    }
    void scores(const Group& g) {
        const int tiles = (g.first + g.count - 1) * c.segment_len / s2o::SCORE_BLOCK;
        const int rows = (g.count * (c.heads / c.kv_heads) + s2o::SCORE_ROWS - 1) / s2o::SCORE_ROWS;
        const int heads = c.batch * g.kv_count;
        if (tiles == 0) return;
        // Few tiles per CTA while there are few CTAs, otherwise enough to amortise the load of the coefficients.
        int share = int(std::max<int64_t>(2, std::min<int64_t>(16, int64_t(tiles) * rows * heads / (4 * sms))));
        if (c.share) share = c.share;
        const dim3 grid((tiles + share - 1) / share, rows, heads);
        scores_kernel()<<<grid, s2o::SCORE_THREADS, s2o::score_shared_bytes<D>()>>>(p);
    }
    void sort(const Group& g) {
        const SortPlan s = plan_sort(c, (g.first + g.count - 1) * c.segment_len);
        const int shared_bytes = s2o::sort_shared_bytes(s.buckets, s.window);
        s2o_sort<<<dim3(c.batch * p.num_heads, g.count), s.threads, shared_bytes>>>(p);
    }
    void order_queries() {
        guide_kernel()<<<dim3(c.kv_heads, c.batch), s2o::GUIDE_THREADS>>>(all);
        order_kernel()<<<dim3(c.heads, all.num_segments, c.batch), s2o::QUERY_ORDER_THREADS,
                         s2o::query_order_shared_bytes(c.segment_len)>>>(all);
        CHECK(cudaGetLastError());
    }
    void rank(const Group& g) {
        set_group(g);
        scores(g);
        sort(g);
        CHECK(cudaGetLastError());
    }
    void rank_all() {
        moments();
        for (auto& g : groups) rank(g);
    }
};
