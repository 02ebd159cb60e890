// Checks the ranking kernels against ranking_reference.cuh, then times them. Build and use:
//   nvcc -std=c++20 -O3 -arch=sm_90 -o ranking kernels/bench/ranking.cu
//   ranking [check|small|time|tune|once|all]      `small` is for compute-sanitizer, `once` for a profiler
// Timing is refused when a check fails. Times are medians of CUDA-event timings of all launches of a whole ranking.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../cuda/ranking.cu"
#include "check.cuh"
#include "ranking_reference.cuh"

using s2o::RankingParams;

constexpr int64_t WORKSPACE_LIMIT = 256ll << 20;
constexpr int SHARED_LIMIT = 227 * 1024 - 2048;  // dynamic; the rest is for the sort's own

enum class Data { Normal, Offset, Tiny, Huge, Skewed, Constant, TwoValued, NotFinite };
const char* name_of(Data data) {
    const char* names[] = {"normal", "offset", "tiny", "huge", "skewed", "constant", "two-valued", "not-finite"};
    return names[int(data)];
}

__device__ float normal(uint64_t i) {
    const float u = (mix(2 * i) + 1.f) * 2.3283064e-10f, w = mix(2 * i + 1) * 2.3283064e-10f;
    return sqrtf(-2.f * logf(u)) * cospif(2.f * w);
}
// Element d of a token; the data kinds act on keys, NotFinite on both.
template <typename T>
__global__ void fill(T* x, int64_t n, int D, int heads, uint64_t seed, Data data, bool key) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t token = i / D;
        float v = normal(seed * 0x10000000000ull + i);
        const uint32_t luck = mix(seed * 77 + token);
        if (!key) v += 0.3f * normal(seed * 31 + i % (D * heads));  // a mean that is not nothing
        if (data == Data::NotFinite && luck % 97 == 0) v = luck % 5 < 2 ? NAN : luck % 5 == 2 ? -INFINITY : i % 3 ? v : INFINITY;
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

template <typename T>
struct Tensor {
    T* data = nullptr;
    int64_t count = 0, sb = 0, ss = 0, sh = 0;
    // layout 0 (B,S,H,D), 1 the same with padded rows, 2 (B,H,S,D)
    void make(int batch, int len, int heads, int dim, int layout, uint64_t seed, Data kind, bool key) {
        if (layout == 2) { ss = dim; sh = int64_t(len) * dim; sb = sh * heads; }
        else { sh = dim; ss = int64_t(heads) * dim + (layout == 1 ? 24 : 0); sb = ss * len + (layout == 1 ? 40 : 0); }
        count = sb * batch;
        CHECK(cudaMalloc(&data, count * sizeof(T)));
        fill<<<2048, 256>>>(data, count, dim, heads, seed, kind, key);
    }
    ~Tensor() { cudaFree(data); }
};

struct Case {
    int batch, heads, kv_heads, q_len, k_len, dim, segment_len;
    int layout = 0, front_sink = 4;
    float c = 0.35f;
    Data data = Data::Normal;
    bool f16 = false, queries = false;
    int dense_tail = 0, splits = 0, buckets = 0, window = 0, threads = 0, share = 0;  // 0: as the plan says
    int64_t workspace = WORKSPACE_LIMIT;
};

struct SortPlan {
    int threads, buckets, window;
};
SortPlan plan_sort(const Case& c, int longest) {
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
// Bytes of the scores and kv_perm of rows that hold `keys` keys together.
int64_t row_bytes(int64_t keys) { return keys * (4 + 2) + keys / s2o::SCORE_BLOCK * 8; }

std::vector<Group> plan_groups(const Case& c) {
    const int first = (c.k_len - c.q_len) / c.segment_len, end = (c.k_len + c.segment_len - 1) / c.segment_len;
    const int64_t heads = int64_t(c.batch) * c.heads / c.kv_heads, limit = c.workspace - 6 * c.dim * int64_t(c.batch) * c.heads * (end - first);
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
    RankingParams all{}, p{};  // of the whole ranking, and of the group at hand
    std::vector<Group> groups;
    int splits = 1, sms = 0;
    cudaEvent_t marks[5];

    explicit Ranking(const Case& c) : c(c) {
        CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        q.make(c.batch, c.q_len, c.heads, D, c.layout, 1, c.data, false);
        k.make(c.batch, c.k_len, c.kv_heads, D, c.layout, 2, c.data, true);
        groups = plan_groups(c);
        all.first_segment = (c.k_len - c.q_len) / c.segment_len;
        all.num_segments = (c.k_len + c.segment_len - 1) / c.segment_len - all.first_segment;
        const int64_t rows = int64_t(c.batch) * c.heads * all.num_segments;
        // CTAs for four on each multiprocessor, of 128 rows at least.
        splits = c.splits ? c.splits : int(std::max<int64_t>(1, std::min<int64_t>((4 * sms + rows - 1) / rows, c.segment_len / 128)));
        int64_t keys = 1;
        for (auto& g : groups) keys = std::max(keys, g.keys * c.batch * c.heads / c.kv_heads * g.kv_count);
        CHECK(cudaMalloc(&all.kv_perm, keys * 4));
        CHECK(cudaMalloc(&all.scores, keys * 2));
        CHECK(cudaMalloc(&all.score_ranges, (keys / s2o::SCORE_BLOCK + 1) * 8));
        CHECK(cudaMalloc(&all.coefficients, rows * 3 * D * 2));
        CHECK(cudaMalloc(&all.partial_moments, rows * splits * (2 * D + 1) * 4));
        CHECK(cudaMalloc(&all.arrivals, rows * 4));
        CHECK(cudaMemset(all.arrivals, 0, rows * 4));
        CHECK(cudaMalloc(&all.q_perm, 4ll * c.batch * c.heads * c.q_len));
        CHECK(cudaMalloc(&all.key_guide, 4 * c.batch * c.kv_heads * D));
        all.q = q.data; all.k = k.data;
        all.q_strides = {q.sb, q.ss, q.sh};
        all.k_strides = {k.sb, k.ss, k.sh};
        all.coefficient_head_stride = int64_t(all.num_segments) * 3 * D;
        all.coefficient_batch_stride = c.heads * all.coefficient_head_stride;
        all.coefficient_segment = all.first_segment;
        all.batch = c.batch; all.num_heads = c.heads; all.num_kv_heads = c.kv_heads; all.q_len = c.q_len; all.k_len = c.k_len;
        all.segment_len = c.segment_len; all.front_sink = c.front_sink; all.ranked_rows = c.q_len - c.dense_tail;
        all.softmax_scale = 1.f / sqrtf(float(D)); all.second_cumulant = c.c;
        p = all;
        CHECK(cudaFuncSetAttribute(s2o_sort, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_LIMIT));
        CHECK(cudaFuncSetAttribute(scores_kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, s2o::score_shared_bytes<D>()));
        CHECK(cudaFuncSetAttribute(order_kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, s2o::query_order_shared_bytes(16384)));
        for (auto& m : marks) CHECK(cudaEventCreate(&m));
    }
    ~Ranking() {
        for (void* x : {(void*)all.kv_perm, (void*)all.scores, (void*)all.score_ranges, all.coefficients, (void*)all.partial_moments,
                        (void*)all.arrivals, (void*)all.q_perm, (void*)all.key_guide}) cudaFree(x);
        for (auto& m : marks) cudaEventDestroy(m);
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
        p.q = q.data + g.kv_first * group * q.sh;
        p.k = k.data + g.kv_first * k.sh;
        p.coefficients = static_cast<uint16_t*>(all.coefficients) + g.kv_first * group * all.coefficient_head_stride;
        p.kv_perm_head_stride = g.keys;
        const SortPlan s = plan_sort(c, (g.first + g.count - 1) * c.segment_len);
        p.sort_buckets = s.buckets;
        p.sort_window = s.window;
    }
    void scores(const Group& g) {
        const int tiles = (g.first + g.count - 1) * c.segment_len / s2o::SCORE_BLOCK;
        const int rows = (g.count * (c.heads / c.kv_heads) + s2o::SCORE_ROWS - 1) / s2o::SCORE_ROWS, heads = c.batch * g.kv_count;
        if (tiles == 0) return;
        // Few tiles a CTA while there are few CTAs, else enough to pay for loading its coefficients.
        const int share = c.share ? c.share : std::max<int64_t>(2, std::min<int64_t>(16, int64_t(tiles) * rows * heads / (4 * sms)));
        scores_kernel()<<<dim3((tiles + share - 1) / share, rows, heads), s2o::SCORE_THREADS, s2o::score_shared_bytes<D>()>>>(p);
    }
    void sort(const Group& g) {
        const SortPlan s = plan_sort(c, (g.first + g.count - 1) * c.segment_len);
        s2o_sort<<<dim3(c.batch * p.num_heads, g.count), s.threads, s2o::sort_shared_bytes(s.buckets, s.window)>>>(p);
    }
    void order_queries() {
        guide_kernel()<<<dim3(c.kv_heads, c.batch), s2o::GUIDE_THREADS>>>(all);
        order_kernel()<<<dim3(c.heads, all.num_segments, c.batch), s2o::QUERY_ORDER_THREADS, s2o::query_order_shared_bytes(c.segment_len)>>>(all);
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

int passed = 0, failed = 0;
double worst_deviation = 0;

template <typename V>
std::vector<V> fetch(const V* device, int64_t count) {
    std::vector<V> host(count);
    CHECK(cudaMemcpy(host.data(), device, count * sizeof(V), cudaMemcpyDeviceToHost));
    return host;
}

// What is wrong with one row, or nothing. `deviation`: largest distance of a score from the one at its place in the
// sorted order, beyond the products' error, over the row's range.
std::string row_fault(const int32_t* perm, const double* score, const double* error, int length, int sink, double& deviation) {
    std::vector<char> seen(length, 0);
    std::vector<int> wanted_first;
    std::vector<double> sorted;
    double noise = 0;
    for (int i = 0; i < length; ++i) {
        if (perm[i] < 0 || perm[i] >= length || seen[perm[i]]++) return "not a permutation at " + std::to_string(i);
    }
    for (int t = 0; t < std::min(sink, length); ++t) wanted_first.push_back(t);
    for (int t = sink; t < length; ++t) {
        if (!std::isfinite(score[t])) wanted_first.push_back(t);
        else sorted.push_back(score[t]), noise = std::max(noise, error[t]);
    }
    for (size_t i = 0; i < wanted_first.size(); ++i) {
        if (perm[i] != wanted_first[i]) return "place " + std::to_string(i) + " holds " + std::to_string(perm[i]) + ", not " + std::to_string(wanted_first[i]);
    }
    if (sorted.empty()) return "";
    std::sort(sorted.begin(), sorted.end(), std::greater<double>());
    const double range = sorted.front() - sorted.back();
    deviation = 0;
    bool constant = range == 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
        const int token = perm[wanted_first.size() + i];
        const double away = fabs(score[token] - sorted[i]);
        if (constant && i > 0 && token < perm[wanted_first.size() + i - 1]) return "equal scores not in order of tokens";
        deviation = std::max(deviation, (away - 3 * noise) / std::max(range, 1e-300));
    }
    return deviation < 1. / 4096 || constant ? "" : "score " + std::to_string(deviation) + " of the range from its place";
}

template <typename T, int D>
void check(const Case& c) {
    Ranking<T, D> r(c);
    uint8_t* finite;
    CHECK(cudaMalloc(&finite, int64_t(c.batch) * c.heads * c.q_len));
    CHECK(cudaMemset(r.all.coefficients, 0xff, r.all.coefficient_batch_stride * c.batch * 2));
    r.moments();
    const auto coefficients = fetch(static_cast<uint16_t*>(r.all.coefficients), r.all.coefficient_batch_stride * c.batch);
    std::string fault;
    double deviation = 0;
    for (auto& g : r.groups) {
        r.set_group(g);
        const int64_t heads = int64_t(c.batch) * r.p.num_heads, keys = heads * g.keys;
        reference::finite_queries<T><<<(heads * c.q_len + 255) / 256, 256>>>(r.p, D, finite);
        CHECK(cudaMemset(r.p.kv_perm, 0xff, keys * 4));
        CHECK(cudaMemset(r.p.scores, 0xa5, keys * 2));
        r.rank(g);
        double *mean, *square, *score, *error;
        CHECK(cudaMalloc(&mean, heads * g.count * D * 8));
        CHECK(cudaMalloc(&square, heads * g.count * D * 8));
        CHECK(cudaMalloc(&score, std::max<int64_t>(1, keys) * 8));
        CHECK(cudaMalloc(&error, std::max<int64_t>(1, keys) * 8));
        reference::coefficients<T><<<dim3(r.p.num_heads, g.count, c.batch), D>>>(r.p, finite, mean, square);
        const int longest = (g.first + g.count - 1) * c.segment_len;
        if (longest) reference::scores<T><<<dim3(heads, g.count, (longest + 127) / 128), 128>>>(r.p, D, mean, square, score, error);
        CHECK(cudaDeviceSynchronize());
        const auto perm = fetch(r.p.kv_perm, keys);
        const auto scores = fetch(score, keys), errors = fetch(error, keys);
        for (int64_t head = 0; head < heads && fault.empty(); ++head) {
            for (int n = g.first; n < g.first + g.count && fault.empty(); ++n) {
                const int64_t at = head * g.keys + s2o::prefix_row(r.p, n);
                double d = 0;
                fault = row_fault(perm.data() + at, scores.data() + at, errors.data() + at, n * c.segment_len, c.front_sink, d);
                deviation = std::max(deviation, d);
                if (!fault.empty()) fault = "head " + std::to_string(head) + " segment " + std::to_string(n) + ": " + fault;
            }
        }
        CHECK(cudaMemset(r.p.kv_perm, 0xff, keys * 4));
        r.rank(g);
        if (fault.empty() && fetch(r.p.kv_perm, keys) != perm) fault = "two launches differ";
        cudaFree(mean); cudaFree(square); cudaFree(score); cudaFree(error);
    }
    r.moments();
    if (fault.empty() && fetch(static_cast<uint16_t*>(r.all.coefficients), int64_t(coefficients.size())) != coefficients) fault = "two launches' coefficients differ";
    cudaFree(finite);
    worst_deviation = std::max(worst_deviation, deviation);
    fault.empty() ? ++passed : ++failed;
    if (!fault.empty() || getenv("VERBOSE")) {
        printf("%s %s b%d h%d/%d q%d k%d D%d S%d layout%d sink%d c%g %s splits%d buckets%d window%d threads%d groups %zu: deviation %.1e %s\n",
               fault.empty() ? "ok  " : "FAIL", c.f16 ? "f16" : "bf16", c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, D, c.segment_len,
               c.layout, c.front_sink, c.c, name_of(c.data), r.splits, c.buckets, c.window, c.threads, r.groups.size(), deviation, fault.c_str());
    }
}

// q_perm against double products, on the host.
template <typename T, int D>
void check_queries(const Case& c) {
    Ranking<T, D> r(c);
    const auto q = fetch(r.q.data, r.q.count), k = fetch(r.k.data, r.k.count);
    CHECK(cudaMemset(r.p.q_perm, 0xff, 4ll * c.batch * c.heads * c.q_len));
    r.order_queries();
    const auto perm = fetch(r.p.q_perm, int64_t(c.batch) * c.heads * c.q_len);
    std::string fault;
    const int keys = std::min(c.segment_len, c.k_len), first = (c.k_len - c.q_len) / c.segment_len;
    for (int b = 0; b < c.batch; ++b) {
        for (int h = 0; h < c.heads; ++h) {
            double guide[D] = {};
            for (int t = 0; t < keys; ++t) {
                for (int d = 0; d < D; ++d) guide[d] += float(k[b * r.k.sb + t * r.k.ss + h / (c.heads / c.kv_heads) * r.k.sh + d]) / double(keys);
            }
            for (int n = first; n * c.segment_len < c.k_len && fault.empty(); ++n) {
                const s2o::SegmentRows rows = s2o::segment_rows(r.p, n);
                const int ranked = std::max(0, std::min(rows.end, c.q_len - c.dense_tail) - rows.begin);
                const int32_t* out = perm.data() + (int64_t(b) * c.heads + h) * c.q_len;
                std::vector<double> score(c.q_len);
                std::vector<int> want, seen(c.q_len, 0);
                double size = 0;
                for (int row = rows.begin; row < rows.begin + ranked; ++row) {
                    double bound = 0;
                    for (int d = 0; d < D; ++d) {
                        const double x = float(q[b * r.q.sb + row * r.q.ss + h * r.q.sh + d]) * guide[d];
                        score[row] += x;
                        bound += fabs(x);
                    }
                    if (std::isfinite(bound)) size = std::max(size, bound);
                    want.push_back(row);
                }
                std::stable_sort(want.begin(), want.end(), [&](int x, int y) {
                    const bool fx = std::isfinite(score[x]), fy = std::isfinite(score[y]);
                    return fx && fy ? score[x] > score[y] : fx < fy;
                });
                for (int i = 0; i < rows.end - rows.begin && fault.empty(); ++i) {
                    const int got = out[rows.begin + i], wanted = i < ranked ? want[i] : rows.begin + i;
                    const bool inside = got >= rows.begin && got < rows.end && !seen[got]++;
                    const bool near = inside && (got == wanted || fabs(score[got] - score[wanted]) < 1e-5 * size);
                    if (!near) fault = "slot " + std::to_string(rows.begin + i) + " holds " + std::to_string(got);
                }
            }
        }
    }
    fault.empty() ? ++passed : ++failed;
    if (!fault.empty()) printf("FAIL q_perm q%d k%d S%d D%d %s: %s\n", c.q_len, c.k_len, c.segment_len, D, name_of(c.data), fault.c_str());
}

void run(const Case& c) {
    auto go = [&](auto element) {
        using T = decltype(element);
        if (c.queries) c.dim == 128 ? check_queries<T, 128>(c) : check_queries<T, 64>(c);
        else c.dim == 128 ? check<T, 128>(c) : check<T, 64>(c);
    };
    c.f16 ? go(__half()) : go(__nv_bfloat16());
}

void check_small() {
    run({1, 4, 2, 512, 512, 128, 128});
    run({.batch = 2, .heads = 2, .kv_heads = 2, .q_len = 300, .k_len = 700, .dim = 64, .segment_len = 128, .layout = 1, .f16 = true, .splits = 2});
    run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 640, .k_len = 640, .dim = 128, .segment_len = 256, .data = Data::NotFinite, .window = 192});
    run({.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 1024, .k_len = 1024, .dim = 64, .segment_len = 512, .data = Data::Constant, .window = 128});
    run({.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 1024, .k_len = 1024, .dim = 64, .segment_len = 512, .data = Data::TwoValued, .window = 448});
    run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 300, .k_len = 500, .dim = 128, .segment_len = 128, .queries = true, .dense_tail = 70});
    run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 300, .k_len = 500, .dim = 64, .segment_len = 128, .f16 = true, .queries = true});
}

void check_all() {
    check_small();
    const Data kinds[] = {Data::Normal, Data::Offset, Data::Tiny, Data::Huge, Data::Skewed, Data::Constant, Data::TwoValued, Data::NotFinite};
    for (Data data : kinds) {
        for (int dim : {64, 128}) {
            for (bool f16 : {false, true}) {
                for (float c : {0.f, 0.35f}) {
                    run({.batch = 1, .heads = 4, .kv_heads = 2, .q_len = 2048, .k_len = 2048, .dim = dim, .segment_len = 256, .c = c, .data = data, .f16 = f16});
                    run({.batch = 1, .heads = 4, .kv_heads = 1, .q_len = 1000, .k_len = 3333, .dim = dim, .segment_len = 512, .layout = 2, .c = c, .data = data, .f16 = f16, .splits = 3, .window = 640});
                }
                run({.batch = 2, .heads = 4, .kv_heads = 4, .q_len = 700, .k_len = 900, .dim = dim, .segment_len = 384, .layout = 1, .data = data, .f16 = f16, .queries = true, .dense_tail = 128});
            }
        }
        run({.batch = 1, .heads = 8, .kv_heads = 8, .q_len = 8192, .k_len = 8192, .dim = 128, .segment_len = 512, .front_sink = 0, .data = data});
        run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 5000, .k_len = 70000, .dim = 128, .segment_len = 2048, .data = data});
        run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 2048, .k_len = 131072, .dim = 128, .segment_len = 2048, .data = data});
    }
    for (int threads : {256, 512, 1024}) {
        for (int buckets : {8192, 16384}) {
            for (int window : {64, 1024, 20032}) {
                for (Data data : {Data::Normal, Data::TwoValued}) {
                    run({.batch = 1, .heads = 5, .kv_heads = 1, .q_len = 1100, .k_len = 12345, .dim = 64, .segment_len = 1024, .front_sink = 17, .data = data, .buckets = buckets, .window = window, .threads = threads});
                }
            }
        }
    }
    run({.batch = 2, .heads = 8, .kv_heads = 2, .q_len = 9000, .k_len = 9000, .dim = 128, .segment_len = 128, .workspace = 6 << 20});
    run({.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 16384, .k_len = 16384, .dim = 128, .segment_len = 1024, .workspace = 12 << 20});
    run({.batch = 2, .heads = 6, .kv_heads = 3, .q_len = 3000, .k_len = 4100, .dim = 64, .segment_len = 256, .layout = 2, .data = Data::NotFinite, .workspace = 2 << 20});
    run({.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 4096, .k_len = 1 << 20, .dim = 128, .segment_len = 4096});
    run({.batch = 1, .heads = 2, .kv_heads = 2, .q_len = 16384, .k_len = 20000, .dim = 128, .segment_len = 16384, .queries = true});
    printf("worst deviation of a score from its place, beyond the products' error: %.2e of the row's range\n", worst_deviation);
}

float median(std::vector<float> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

struct Times {
    float total, moments, scores, sort;
};
template <typename T = __nv_bfloat16, int D = 128>
Times time_ranking(const Case& c, int repeats = 15) {
    Ranking<T, D> r(c);
    auto elapsed = [&](auto launch) {
        std::vector<float> times;
        for (int i = 0; i < repeats + 3; ++i) {
            CHECK(cudaEventRecord(r.marks[0]));
            launch();
            CHECK(cudaEventRecord(r.marks[1]));
            CHECK(cudaEventSynchronize(r.marks[1]));
            float ms;
            CHECK(cudaEventElapsedTime(&ms, r.marks[0], r.marks[1]));
            if (i >= 3) times.push_back(ms);
        }
        return median(times);
    };
    Times t{};
    t.total = elapsed([&] { r.rank_all(); });
    t.moments = elapsed([&] { r.moments(); });
    for (auto& g : r.groups) {
        r.set_group(g);
        std::vector<float> parts[2];
        for (int i = 0; i < repeats; ++i) {
            CHECK(cudaEventRecord(r.marks[0]));
            r.scores(g);
            CHECK(cudaEventRecord(r.marks[1]));
            r.sort(g);
            CHECK(cudaEventRecord(r.marks[2]));
            CHECK(cudaEventSynchronize(r.marks[2]));
            for (int part = 0; part < 2; ++part) {
                float ms;
                CHECK(cudaEventElapsedTime(&ms, r.marks[part], r.marks[part + 1]));
                parts[part].push_back(ms);
            }
        }
        t.scores += median(parts[0]);
        t.sort += median(parts[1]);
    }
    return t;
}

void print_times(const char* what, const Case& c) {
    const Times t = time_ranking(c);
    printf("%-10s L %6d S %4d  %-10s total %.3f ms  (moments %.3f scores %.3f sort %.3f)\n", what, c.k_len, c.segment_len, name_of(c.data), t.total, t.moments, t.scores, t.sort);
}

void time_all() {
    for (int length = 4096; length <= 131072; length *= 2) {
        for (int segment = 512; segment <= 4096; segment *= 2) {
            if (segment < length) print_times("bf16", {1, 32, 8, length, length, 128, segment});
        }
    }
    for (Data data : {Data::Skewed, Data::Offset, Data::Constant, Data::TwoValued}) {
        print_times("bf16", {.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 131072, .k_len = 131072, .dim = 128, .segment_len = 2048, .data = data});
    }
    print_times("mean query", {.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 131072, .k_len = 131072, .dim = 128, .segment_len = 2048, .c = 0});
    print_times("last 8K", {.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 8192, .k_len = 131072, .dim = 128, .segment_len = 2048});
}

// Launch settings at 128K, S = 2048.
void tune() {
    Case c{.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 131072, .k_len = 131072, .dim = 128, .segment_len = 2048};
    auto with = [&](const char* what, int value, int& setting) {
        char label[64];
        snprintf(label, sizeof label, "%s %d", what, setting = value);
        print_times(label, c);
        setting = 0;
    };
    for (int splits : {1, 2, 4}) with("splits", splits, c.splits);
    for (int share : {6, 8, 11, 16, 20}) with("share", share, c.share);
    for (int buckets : {8192, 16384}) with("buckets", buckets, c.buckets);
    c.buckets = 8192;
    c.window = 20032;
    with("threads", 512, c.threads);
}

void rank_once() {
    Ranking<__nv_bfloat16, 128> r({.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 131072, .k_len = 131072, .dim = 128, .segment_len = 2048});
    r.rank_all();
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "all";
    if (mode == "small") check_small();
    if (mode == "check" || mode == "all") check_all();
    if (mode == "once") rank_once();
    if (mode == "small" || mode == "check" || mode == "all") printf("%d passed, %d failed\n", passed, failed);
    if (failed) return 1;
    if (mode == "time" || mode == "all") time_all();
    if (mode == "tune") tune();
    return 0;
}
