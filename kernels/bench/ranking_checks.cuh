// The checks of ranking.cu: orders against ranking_reference.cuh, and two launches bit for bit.
#pragma once
#include <string>

#include "ranking_problem.cuh"
#include "ranking_reference.cuh"

inline double worst_deviation = 0;

// The fault of one row, or an empty string. `deviation`: largest distance of a score from the score at its place in the
// sorted order, beyond the products' error, over the row's range.
inline std::string row_fault(const int32_t* perm, const double* score, const double* error, int length, int sink,
                             double& deviation) {
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
        if (perm[i] != wanted_first[i]) {
            return "place " + std::to_string(i) + " holds " + std::to_string(perm[i]) + ", not " +
                   std::to_string(wanted_first[i]);
        }
    }
    if (sorted.empty()) return "";
    std::sort(sorted.begin(), sorted.end(), std::greater<double>());
    const double range = sorted.front() - sorted.back();
    deviation = 0;
    bool constant = range == 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
        const int token = perm[wanted_first.size() + i];
        const double away = fabs(score[token] - sorted[i]);
        if (constant && i > 0 && token < perm[wanted_first.size() + i - 1]) {
            return "equal scores not in order of tokens";
        }
        deviation = std::max(deviation, (away - 3 * noise) / std::max(range, 1e-300));
    }
    if (deviation < 1. / 4096 || constant) return "";
    return "score " + std::to_string(deviation) + " of the range from its place";
}

template <typename T, int D>
void check(const Case& c) {
    Ranking<T, D> r(c);
    const Buffer<uint8_t> finite(int64_t(c.batch) * c.heads * c.q_len);
    r.coefficients.fill(0xff);
    r.moments();
    const auto coefficients = fetch(r.coefficients.data, r.coefficients.count);
    std::string fault;
    double deviation = 0;
    for (auto& g : r.groups) {
        r.set_group(g);
        const int64_t heads = int64_t(c.batch) * r.p.num_heads, keys = heads * g.keys;
        reference::finite_queries<T><<<(heads * c.q_len + 255) / 256, 256>>>(r.p, D, finite.data);
        r.kv_perm.fill(0xff);
        r.scores_of_keys.fill(0xa5);
        r.rank(g);
        const Buffer<double> mean(heads * g.count * D), square(heads * g.count * D), score(keys), error(keys);
        reference::coefficients<T><<<dim3(r.p.num_heads, g.count, c.batch), D>>>(r.p, finite.data, mean.data,
                                                                                   square.data);
        const int longest = (g.first + g.count - 1) * c.segment_len;
        if (longest) {
            reference::scores<T><<<dim3(heads, g.count, (longest + 127) / 128), 128>>>(r.p, D, mean.data, square.data,
                                                                                      score.data, error.data);
        }
        CHECK(cudaDeviceSynchronize());
        const auto perm = fetch(r.p.kv_perm, keys);
        const auto scores = fetch(score.data, keys), errors = fetch(error.data, keys);
        for (int64_t head = 0; head < heads && fault.empty(); ++head) {
            for (int n = g.first; n < g.first + g.count && fault.empty(); ++n) {
                const int64_t at = head * g.keys + s2o::prefix_row(r.p, n);
                double d = 0;
                fault = row_fault(perm.data() + at, scores.data() + at, errors.data() + at, n * c.segment_len,
                                  c.front_sink, d);
                deviation = std::max(deviation, d);
                if (fault.empty()) continue;
                fault = "head " + std::to_string(head) + " segment " + std::to_string(n) + ": " + fault;
            }
        }
        r.kv_perm.fill(0xff);
        r.rank(g);
        if (fault.empty() && fetch(r.p.kv_perm, keys) != perm) fault = "two launches differ";
    }
    r.moments();
    if (fault.empty() && fetch(r.coefficients.data, r.coefficients.count) != coefficients) {
        fault = "two launches' coefficients differ";
    }
    worst_deviation = std::max(worst_deviation, deviation);
    fault.empty() ? ++passed : ++failed;
    if (!fault.empty() || getenv("VERBOSE")) {
        printf("%s %s b%d h%d/%d q%d k%d D%d S%d layout%d sink%d c%g %s splits%d buckets%d window%d threads%d "
               "groups %zu: deviation %.1e %s\n",
               fault.empty() ? "ok  " : "FAIL", c.f16 ? "f16" : "bf16", c.batch, c.heads, c.kv_heads, c.q_len, c.k_len,
               D, c.segment_len, c.layout, c.front_sink, c.c, name_of(c.data), r.splits, c.buckets, c.window, c.threads,
               r.groups.size(), deviation, fault.c_str());
    }
}

// Checks q_perm against products in double precision, on the host.
template <typename T, int D>
void check_queries(const Case& c) {
    Ranking<T, D> r(c);
    const auto q = fetch(r.q.data, r.q.count), k = fetch(r.k.data, r.k.count);
    r.q_perm.fill(0xff);
    r.order_queries();
    const auto perm = fetch(r.q_perm.data, r.q_perm.count);
    std::string fault;
    const int keys = std::min(c.segment_len, c.k_len), first = (c.k_len - c.q_len) / c.segment_len;
    for (int b = 0; b < c.batch; ++b) {
        for (int h = 0; h < c.heads; ++h) {
            double guide[D] = {};
            const auto &qs = r.q.strides, &ks = r.k.strides;
            const T* head_k = k.data() + b * ks.batch + h / (c.heads / c.kv_heads) * ks.head;
            for (int t = 0; t < keys; ++t) {
                for (int d = 0; d < D; ++d) guide[d] += float(head_k[t * ks.seq + d]) / double(keys);
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
                        const double x = float(q[b * qs.batch + row * qs.seq + h * qs.head + d]) * guide[d];
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
    if (!fault.empty()) {
        printf("FAIL q_perm q%d k%d S%d D%d %s: %s\n", c.q_len, c.k_len, c.segment_len, D, name_of(c.data),
               fault.c_str());
    }
}

inline void run(const Case& c) {
    auto go = [&](auto element) {
        using T = decltype(element);
        if (c.queries) c.dim == 128 ? check_queries<T, 128>(c) : check_queries<T, 64>(c);
        else c.dim == 128 ? check<T, 128>(c) : check<T, 64>(c);
    };
    c.f16 ? go(__half()) : go(__nv_bfloat16());
}

inline void check_small() {
    run({1, 4, 2, 512, 512, 128, 128});
    run({.batch = 2, .heads = 2, .kv_heads = 2, .q_len = 300, .k_len = 700, .dim = 64, .segment_len = 128, .layout = 1,
         .f16 = true, .splits = 2});
    run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 640, .k_len = 640, .dim = 128, .segment_len = 256,
         .data = Data::NotFinite, .window = 192});
    run({.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 1024, .k_len = 1024, .dim = 64, .segment_len = 512,
         .data = Data::Constant, .window = 128});
    run({.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 1024, .k_len = 1024, .dim = 64, .segment_len = 512,
         .data = Data::TwoValued, .window = 448});
    run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 300, .k_len = 500, .dim = 128, .segment_len = 128,
         .queries = true, .dense_tail = 70});
    run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 300, .k_len = 500, .dim = 64, .segment_len = 128, .f16 = true,
         .queries = true});
}

inline void check_all() {
    check_small();
    for (int kind = 0; kind <= int(Data::NotFinite); ++kind) {
        const Data data{kind};
        for (int dim : {64, 128}) {
            for (bool f16 : {false, true}) {
                for (float c : {0.f, 0.35f}) {
                    run({.batch = 1, .heads = 4, .kv_heads = 2, .q_len = 2048, .k_len = 2048, .dim = dim,
                         .segment_len = 256, .c = c, .data = data, .f16 = f16});
                    run({.batch = 1, .heads = 4, .kv_heads = 1, .q_len = 1000, .k_len = 3333, .dim = dim,
                         .segment_len = 512, .layout = 2, .c = c, .data = data, .f16 = f16, .splits = 3,
                         .window = 640});
                }
                run({.batch = 2, .heads = 4, .kv_heads = 4, .q_len = 700, .k_len = 900, .dim = dim, .segment_len = 384,
                     .layout = 1, .data = data, .f16 = f16, .queries = true, .dense_tail = 128});
            }
        }
        run({.batch = 1, .heads = 8, .kv_heads = 8, .q_len = 8192, .k_len = 8192, .dim = 128, .segment_len = 512,
             .front_sink = 0, .data = data});
        run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 5000, .k_len = 70000, .dim = 128, .segment_len = 2048,
             .data = data});
        run({.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 2048, .k_len = 131072, .dim = 128, .segment_len = 2048,
             .data = data});
    }
    for (int threads : {256, 512, 1024}) {
        for (int buckets : {8192, 16384}) {
            for (int window : {64, 1024, 20032}) {
                for (Data data : {Data::Normal, Data::TwoValued}) {
                    run({.batch = 1, .heads = 5, .kv_heads = 1, .q_len = 1100, .k_len = 12345, .dim = 64,
                         .segment_len = 1024, .front_sink = 17, .data = data, .buckets = buckets, .window = window,
                         .threads = threads});
                }
            }
        }
    }
    run({.batch = 2, .heads = 8, .kv_heads = 2, .q_len = 9000, .k_len = 9000, .dim = 128, .segment_len = 128,
         .workspace = 6 << 20});
    run({.batch = 1, .heads = 32, .kv_heads = 8, .q_len = 16384, .k_len = 16384, .dim = 128, .segment_len = 1024,
         .workspace = 12 << 20});
    run({.batch = 2, .heads = 6, .kv_heads = 3, .q_len = 3000, .k_len = 4100, .dim = 64, .segment_len = 256,
         .layout = 2, .data = Data::NotFinite, .workspace = 2 << 20});
    run({.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 4096, .k_len = 1 << 20, .dim = 128, .segment_len = 4096});
    run({.batch = 1, .heads = 2, .kv_heads = 2, .q_len = 16384, .k_len = 20000, .dim = 128, .segment_len = 16384,
         .queries = true});
    printf("worst deviation of a score from its place, beyond the products' error: %.2e of the row's range\n",
           worst_deviation);
}
