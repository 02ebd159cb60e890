// Checks the sm_90a kernels against reference.cuh, then times them. Build and use:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -o runner kernels/bench/runner.cu
//   runner [check|small|time|ladder|stop|all] [longest]      `small` is for compute-sanitizer
// Timing is refused when a check fails. Times are medians of CUDA-event timings, one launch each, on random data.
#include <cstring>
#include <random>

#include "problem.cuh"

int passed = 0, failed = 0;

// Relative Frobenius error of the rows the reference has (every row_step-th), NaN counts as failure; lse absolute.
template <typename T, int D>
void compare(const char* what, Problem<T, D>& pr, const float* ref, const float* ref_lse, int rows, int row_step) {
    const Case& c = pr.c;
    std::vector<T> out(pr.out.count);
    std::vector<float> want(int64_t(c.batch) * rows * c.heads * D), lse(int64_t(c.batch) * c.heads * c.q_len), want_lse;
    CHECK(cudaMemcpy(out.data(), pr.out.data, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(want.data(), ref, want.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse.data(), pr.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
    double diff = 0, norm = 0, worst_row = 0, lse_err = 0;
    if (ref_lse) {
        want_lse.resize(int64_t(c.batch) * c.heads * rows);
        CHECK(cudaMemcpy(want_lse.data(), ref_lse, want_lse.size() * 4, cudaMemcpyDeviceToHost));
    }
    for (int b = 0; b < c.batch; ++b)
        for (int r = 0; r < rows; ++r)
            for (int h = 0; h < c.heads; ++h) {
                const int row = std::min(r * row_step, c.q_len - 1);
                double rd = 0, rn = 0;
                for (int d = 0; d < D; ++d) {
                    const double x = float(out[b * pr.out.sb + row * pr.out.ss + h * pr.out.sh + d]);
                    const double y = want[((int64_t(b) * rows + r) * c.heads + h) * D + d];
                    rd += (x - y) * (x - y);
                    rn += y * y;
                }
                diff += rd; norm += rn;
                if (rn == 0 && rd == 0) continue;  // a row without keys
                if (!(rd / rn <= worst_row)) worst_row = rd / rn;
                if (ref_lse) {
                    const float want = want_lse[(int64_t(b) * c.heads + h) * rows + r];
                    const double e = fabs(lse[(int64_t(b) * c.heads + h) * c.q_len + row] - want);
                    if (!(e <= lse_err)) lse_err = e;
                }
            }
    const double rel = norm > 0 ? sqrt(diff / norm) : sqrt(diff), worst = sqrt(worst_row);
    const bool ok = rel < 5e-3 && worst < 2e-2 && lse_err < 2e-3;
    ok ? ++passed : ++failed;
    if (!ok || getenv("VERBOSE"))
        printf("%s %s b%d h%d/%d q%d k%d causal%d layout%d D%d: rel %.2e worst row %.2e lse %.2e\n", ok ? "ok  " : "FAIL",
               what, c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, c.layout, D, rel, worst, lse_err);
}

// A second launch gives the same bits.
template <typename T, int D, class F>
void check_repeatable(const char* what, Problem<T, D>& pr, F launch) {
    std::vector<T> first(pr.out.count), second(pr.out.count);
    CHECK(cudaMemcpy(first.data(), pr.out.data, first.size() * sizeof(T), cudaMemcpyDeviceToHost));
    pr.poison();
    launch();
    CHECK(cudaMemcpy(second.data(), pr.out.data, second.size() * sizeof(T), cudaMemcpyDeviceToHost));
    const bool same = !memcmp(first.data(), second.data(), first.size() * sizeof(T));
    same ? ++passed : ++failed;
    if (!same) printf("FAIL %s: two launches differ\n", what);
}

template <typename T, int D>
void check_dense(const Case& c, float std = 1.f) {
    Problem<T, D> pr(c, std);
    const int row_step = c.q_len > 4096 ? c.q_len / 61 : 1, rows = (c.q_len + row_step - 1) / row_step;
    float *ref, *ref_lse;
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * rows * c.heads * D));
    CHECK(cudaMalloc(&ref_lse, 4 * int64_t(c.batch) * rows * c.heads));
    reference::dense<T, D><<<dim3(rows, c.heads, c.batch), 32>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(), ref, ref_lse,
        c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, pr.p.attn.softmax_scale, rows, row_step);
    pr.poison();
    pr.dense();
    CHECK(cudaDeviceSynchronize());
    compare("dense", pr, ref, ref_lse, rows, row_step);
    if (c.q_len > 4096) check_repeatable("dense", pr, [&] { pr.dense(); });
    cudaFree(ref); cudaFree(ref_lse);
}

enum Kernel { FULL, LAGGED, EXACT, TWO_PASS };

struct Rule {
    float tau;
    int rule = s2o::ALL_ROWS, literal = 0, discard = 0;
};

int64_t decisions = 0, decisions_that_differ = 0;

// Every segment in groups of `group`; the rows from c.q_len - tail on densely, split over the keys.
template <typename T, int D>
void check_sparse(const Case& c, int segment_len, float std, Kernel kernel, std::vector<Rule> rules, int tail = 0, int group = 1000) {
    const char* names[] = {"sparse full", "sparse", "sparse exact", "two passes"};
    Problem<T, D> pr(c, std, segment_len);
    pr.p.ranked_rows = std::max(0, c.q_len - tail);
    const int splits = 3;
    float *ref, *ref_lse, *partial_out;
    int32_t* ref_visited;
    s2o::RowState* partial_state;
    const int64_t n = pr.slots(), split_rows = pr.split_rows(pr.p.ranked_rows, splits);
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * c.q_len * c.heads * D));
    CHECK(cudaMalloc(&ref_lse, 4 * int64_t(c.batch) * c.q_len * c.heads));
    CHECK(cudaMalloc(&ref_visited, 4 * n));
    CHECK(cudaMalloc(&partial_out, std::max<int64_t>(1, 4 * split_rows * D)));
    CHECK(cudaMalloc(&partial_state, std::max<int64_t>(1, 8 * split_rows)));
    if (kernel == TWO_PASS) pr.permute_queries();
    for (int random = 0; random < 2; ++random) {
        for (const Rule& rule : rules) {
            pr.p.tau = rule.tau; pr.p.stop_rule = rule.rule; pr.p.literal_frame = rule.literal; pr.p.discard = rule.discard;
            // Dense first: it also fills in the tail's rows.
            reference::dense<T, D><<<dim3(c.q_len, c.heads, c.batch), 32>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(), ref, ref_lse,
                c.heads, c.kv_heads, c.q_len, c.k_len, true, pr.p.attn.softmax_scale, c.q_len, 1);
            CHECK(cudaMemset(ref_visited, 0xff, 4 * n));
            auto launch = [&](bool reference_too) {
                for (int end = pr.call_segment + pr.call_segments; end > pr.call_segment; end -= group) {
                    const int first = std::max(pr.call_segment, end - group);
                    pr.segments(first, end - first);
                    pr.permute(random);
                    if (reference_too)
                        reference::sparse<T, D><<<dim3(n / (c.batch * c.heads), c.heads, c.batch), s2o::TILE_Q>>>(pr.q.strided(), pr.k.strided(),
                            pr.v.strided(), pr.p, kernel == LAGGED ? LAG : 0, kernel == TWO_PASS, ref, ref_lse, ref_visited);
                    CHECK(cudaGetLastError());
                    if (kernel == FULL) pr.sparse_full();
                    if (kernel == LAGGED) pr.sparse();
                    if (kernel == EXACT) pr.sparse_exact();
                    if (kernel == TWO_PASS) pr.two_pass();
                }
                if (tail) pr.split(pr.p.ranked_rows, splits, partial_out, partial_state);
                CHECK(cudaDeviceSynchronize());
            };
            pr.poison();
            launch(true);
            std::vector<int32_t> a(n), b(n);
            CHECK(cudaMemcpy(a.data(), pr.visited, 4 * n, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(b.data(), ref_visited, 4 * n, cudaMemcpyDeviceToHost));
            int64_t differ = 0, sum = 0, want = 0, counted = 0;
            for (int64_t i = 0; i < n; ++i) {
                differ += a[i] != b[i];
                counted += b[i] >= 0;
                sum += a[i] * (b[i] >= 0);
                want += b[i] * (b[i] >= 0);
            }
            decisions += counted;
            decisions_that_differ += differ;
            if (differ || getenv("VERBOSE"))
                printf("  %s tau %g rule %d literal %d discard %d: tiles visited %ld, reference %ld, items that differ %ld of %ld\n", names[kernel],
                       rule.tau, rule.rule, rule.literal, rule.discard, long(sum), long(want), long(differ), long(counted));
            // An item that stops elsewhere, within rounding of the threshold, has another result: then nothing to compare.
            if (differ == 0) compare(names[kernel], pr, ref, ref_lse, c.q_len, 1);
            check_repeatable(names[kernel], pr, [&] { launch(false); });
        }
    }
    cudaFree(ref); cudaFree(ref_lse); cudaFree(ref_visited); cudaFree(partial_out); cudaFree(partial_state);
}

// Rows first_row.. split over the keys, with the lse; the others by the dense kernel.
template <typename T, int D>
void check_split(const Case& c, int first_row, int splits) {
    Problem<T, D> pr(c);
    float *ref, *ref_lse, *partial_out;
    s2o::RowState* partial_state;
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * c.q_len * c.heads * D));
    CHECK(cudaMalloc(&ref_lse, 4 * int64_t(c.batch) * c.q_len * c.heads));
    CHECK(cudaMalloc(&partial_out, 4 * pr.split_rows(first_row, splits) * D));
    CHECK(cudaMalloc(&partial_state, 8 * pr.split_rows(first_row, splits)));
    CHECK(cudaMemset(partial_out, 0xff, 4 * pr.split_rows(first_row, splits) * D));
    reference::dense<T, D><<<dim3(c.q_len, c.heads, c.batch), 32>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(), ref, ref_lse,
        c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, pr.p.attn.softmax_scale, c.q_len, 1);
    pr.poison();
    if (first_row) pr.dense();
    pr.split(first_row, splits, partial_out, partial_state);
    CHECK(cudaDeviceSynchronize());
    compare("split", pr, ref, ref_lse, c.q_len, 1);
    check_repeatable("split", pr, [&] {
        if (first_row) pr.dense();
        pr.split(first_row, splits, partial_out, partial_state);
    });
    cudaFree(ref); cudaFree(ref_lse); cudaFree(partial_out); cudaFree(partial_state);
}

// Random blocks, `share` of them; some query blocks have none.
template <typename T, int D>
void check_blocks(const Case& c, float share) {
    Problem<T, D> pr(c);
    const int key_blocks = (c.k_len + s2o::TILE_K - 1) / s2o::TILE_K;
    std::mt19937 random(7);
    std::vector<uint8_t> mask(int64_t(c.batch) * c.heads * pr.tiles * key_blocks);
    std::vector<int32_t> list;
    std::vector<int64_t> ranges;
    const int first = c.causal ? (c.k_len - c.q_len) / s2o::TILE_Q : 0;
    for (int64_t i = 0; i < int64_t(c.batch) * c.heads * pr.tiles; ++i) {
        const int last = c.causal ? first + int(i % pr.tiles) : key_blocks - 1;
        ranges.push_back(list.size());
        for (int j = last; j >= 0; --j)
            if (random() < share * 4294967295.f && i % 5) {
                mask[i * key_blocks + j] = 1;
                list.push_back(j);
            }
        ranges.push_back(list.size());
    }
    list.push_back(0);
    uint8_t* d_mask;
    int32_t* d_list;
    int64_t* d_ranges;
    float *ref, *ref_lse;
    CHECK(cudaMalloc(&d_mask, mask.size())); CHECK(cudaMemcpy(d_mask, mask.data(), mask.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&d_list, 4 * list.size())); CHECK(cudaMemcpy(d_list, list.data(), 4 * list.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&d_ranges, 8 * ranges.size())); CHECK(cudaMemcpy(d_ranges, ranges.data(), 8 * ranges.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * c.q_len * c.heads * D));
    CHECK(cudaMalloc(&ref_lse, 4 * int64_t(c.batch) * c.q_len * c.heads));
    reference::dense<T, D><<<dim3(c.q_len, c.heads, c.batch), 32>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(), ref, ref_lse,
        c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, pr.p.attn.softmax_scale, c.q_len, 1, d_mask);
    pr.poison();
    pr.blocks(d_list, d_ranges);
    CHECK(cudaDeviceSynchronize());
    compare("blocks", pr, ref, ref_lse, c.q_len, 1);
    check_repeatable("blocks", pr, [&] { pr.blocks(d_list, d_ranges); });
    cudaFree(d_mask); cudaFree(d_list); cudaFree(d_ranges); cudaFree(ref); cudaFree(ref_lse);
}

// Every key by index, not causal, in natural and in random order.
void check_gather(const Case& c) {
    Problem<__nv_bfloat16, 128> pr(c, 1.f, 128);
    float *ref, *ref_lse;
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * c.q_len * c.heads * 128));
    CHECK(cudaMalloc(&ref_lse, 4 * int64_t(c.batch) * c.q_len * c.heads));
    reference::dense<__nv_bfloat16, 128><<<dim3(c.q_len, c.heads, c.batch), 32>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(), ref, ref_lse,
        c.heads, c.kv_heads, c.q_len, c.k_len, false, pr.p.attn.softmax_scale, c.q_len, 1);
    for (int random = 0; random < 2; ++random)
        for (int asks = 0; asks < 2; ++asks) {
            pr.permute_all(random);
            pr.poison();
            pr.gather_all(asks);
            CHECK(cudaDeviceSynchronize());
            compare("gather", pr, ref, ref_lse, c.q_len, 1);
        }
    cudaFree(ref); cudaFree(ref_lse);
}

void checks(bool small) {
    using B = __nv_bfloat16;
    if (small) {
        check_dense<B, 128>({1, 2, 1, 300, 300, true, 0});
        check_dense<B, 128>({2, 2, 2, 77, 333, true, 1});
        check_dense<__half, 64>({1, 1, 1, 130, 200, false, 2});
        for (Kernel kernel : {FULL, LAGGED, EXACT, TWO_PASS}) {
            std::vector<Rule> rules = {{kernel == FULL ? 0.f : .7f}};
            if (kernel >= EXACT) rules.push_back({.5f, s2o::MEAN_RATIO, 0, 1});
            check_sparse<B, 128>({1, 2, 1, 900, 900, true, 0}, 256, 1.f, kernel, rules, 70);
        }
        check_split<B, 128>({1, 2, 1, 150, 500, true, 0}, 0, 3);
        check_blocks<B, 128>({1, 2, 1, 300, 500, true, 0}, .5f);
        return;
    }
    for (int len : {1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 384, 500, 640, 777, 1000})
        for (int causal = 0; causal < 2; ++causal) {
            check_dense<B, 128>({1, 4, 4, len, len, bool(causal), 0});
            check_dense<B, 128>({2, 8, 2, len, len, bool(causal), 1});
            check_dense<B, 128>({1, 8, 1, (len + 2) / 3, len, bool(causal), 2});
            check_dense<__half, 128>({2, 4, 1, 1, len, bool(causal), 0});
            check_dense<B, 64>({2, 4, 2, (len + 1) / 2, len, bool(causal), 1});
            check_dense<__half, 64>({1, 4, 4, len, len, bool(causal), 2});
        }
    check_dense<B, 128>({1, 8, 2, 4000, 4000, true, 0}, 4.f);  // peaked scores: large rescales
    check_dense<B, 128>({1, 40, 8, 1500, 3001, true, 0});
    check_dense<B, 128>({1, 32, 8, 32768, 32768, true, 0});
    printf("dense: %d passed, %d failed\n", passed, failed);
    const int dense_failed = failed;
    for (int first_row : {0, 1, 100})
        for (int splits : {1, 2, 7, 40}) {
            check_split<B, 128>({1, 8, 2, 300, 1000, true, 0}, first_row, splits);
            check_split<__half, 64>({2, 4, 4, 129, 700, true, 1}, first_row, splits);
            check_split<B, 128>({1, 4, 1, 200, 333, false, 2}, first_row, splits);
        }
    for (int len : {1, 128, 130, 1000})
        for (float share : {.1f, .5f, 1.f}) {
            check_blocks<B, 128>({2, 4, 2, len, len, true, 0}, share);
            check_blocks<__half, 64>({1, 4, 1, (len + 1) / 2, len, true, 1}, share);
            check_blocks<B, 128>({1, 4, 4, (len + 1) / 2, len, false, 2}, share);
        }
    check_gather({1, 4, 2, 640, 640, false, 0});
    check_gather({2, 4, 1, 500, 1024, false, 1});
    printf("split, blocks and gather: %d failed\n", failed - dense_failed);
    const std::vector<Rule> all = {{0.f}, {.2f}, {.5f}, {.2f, s2o::MEAN_RATIO}, {.3f, s2o::SUM_RATIO, 1}, {.3f, s2o::ALL_ROWS, 0, 1},
                                   {.25f, s2o::MEAN_RATIO, 0, 1}, {.2f, s2o::SUM_RATIO, 0, 1}, {.4f, s2o::ALL_ROWS, 1}};
    for (Kernel kernel : {FULL, LAGGED, EXACT, TWO_PASS}) {
        const std::vector<Rule> rules = kernel == FULL ? std::vector<Rule>{{0.f}} : kernel == LAGGED ? std::vector<Rule>{{0.f}, {.2f}, {.5f}} : all;
        check_sparse<B, 128>({1, 4, 2, 1280, 1280, true, 0}, 256, 1.f, kernel, rules);
        check_sparse<B, 128>({2, 4, 1, 1000, 1000, true, 1}, 128, 2.f, kernel, rules, 300, 2);
        check_sparse<B, 128>({1, 8, 2, 555, 1777, true, 2}, 512, 1.f, kernel, rules, 64, 1);
        check_sparse<B, 64>({1, 2, 2, 1500, 1500, true, 0}, 256, 1.f, kernel, rules, 1);
        check_sparse<__half, 128>({1, 2, 2, 1500, 1500, true, 0}, 256, 1.f, kernel, rules, 128, 4);
        check_sparse<__half, 64>({3, 2, 1, 700, 701, true, 1}, 128, 1.f, kernel, rules, 1000);
        check_sparse<B, 128>({1, 4, 2, 2048, 2048, true, 0}, 128, .5f, kernel, rules);
        check_sparse<B, 128>({1, 16, 4, 4096, 4096, true, 0}, 512, 3.f, kernel, kernel == FULL ? rules : std::vector<Rule>{{.02f}, {.1f}}, 128);
        printf("%s done: %d failed\n", std::vector<const char*>{"full", "lagged", "exact", "two passes"}[kernel], failed);
    }
    printf("%ld stop decisions, %ld differ from the reference\n", long(decisions), long(decisions_that_differ));
    if (decisions_that_differ * 1000 > decisions) ++failed;
}

template <class F>
double median_ms(F launch, int runs, bool warm_up = true) {
    cudaEvent_t a, b;
    cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> ms(runs);
    if (warm_up) { launch(); launch(); }
    for (auto& m : ms) {
        cudaEventRecord(a); launch(); cudaEventRecord(b);
        CHECK(cudaEventSynchronize(b));
        cudaEventElapsedTime(&m, a, b);
    }
    std::sort(ms.begin(), ms.end());
    return ms[runs / 2];
}

// Medians of two launches timed in turns, so that both see the same clocks.
template <class F, class G>
std::pair<double, double> paired_ms(F first, G second, int runs) {
    std::vector<double> a, b;
    for (int i = 0; i < runs; ++i) {
        a.push_back(median_ms(first, 1, i == 0));
        b.push_back(median_ms(second, 1, i == 0));
    }
    std::sort(a.begin(), a.end()); std::sort(b.begin(), b.end());
    return {a[runs / 2], b[runs / 2]};
}

int runs(int len) { return len >= 131072 ? 5 : len >= 65536 ? 9 : 41; }
using B = __nv_bfloat16;

template <class F>
void time_step(const char* name, Problem<B, 128>& pr, F step) {
    const auto [dense, ms] = paired_ms([&] { pr.dense(); }, step, runs(pr.c.k_len));
    printf("%s  L=%6d  %9.3f ms  %6.1f TF/s  A %9.3f ms: x%.3f\n", name, pr.c.k_len, ms, pr.flops() / ms * 1e-9, dense, ms / dense);
}

void time_ladder(int longest) {
    for (int len : {8192, 32768, 65536, 131072}) {
        if (len > longest) break;
        Problem<B, 128> pr({1, 32, 8, len, len, true, 0}, 1.f, 2048);
        pr.permute(false);
        time_step("B gather, identity      ", pr, [&] { pr.sparse_full(); });
        pr.permute(true);
        time_step("C gather, random        ", pr, [&] { pr.sparse_full(); });
        pr.p.tau = 1e-30f;
        time_step("  exact stop, never     ", pr, [&] { pr.sparse_exact(); });
        time_step("D random, stop voted    ", pr, [&] { pr.sparse(); });
        Problem<B, 128> full({1, 32, 8, len, len, false, 0}, 1.f, 2048);
        full.permute_all(false);
        time_step("B identity, not causal  ", full, [&] { full.gather_all(false); });
        full.permute_all(true);
        time_step("C random, not causal    ", full, [&] { full.gather_all(false); });
        time_step("D stop voted, not causal", full, [&] { full.gather_all(true); });
    }
}

void time_early_stop(int longest) {
    {
        // Every prefix tile is random here, so the vote decides by tau alone: how fast the machinery skips.
        const int len = longest;
        Problem<B, 128> pr({1, 32, 8, len, len, true, 0}, 1.f, 2048);
        pr.permute(true);
        pr.permute_queries();
        for (int kernel = LAGGED; kernel <= TWO_PASS; ++kernel)
        for (float tau : {.02f, .05f, .1f}) {
            pr.p.tau = tau;
            const double ms = median_ms([&] { kernel == LAGGED ? pr.sparse() : kernel == EXACT ? pr.sparse_exact() : pr.two_pass(); }, runs(len));
            std::vector<int32_t> visited(int64_t(32) * pr.tiles);
            CHECK(cudaMemcpy(visited.data(), pr.visited, 4 * visited.size(), cudaMemcpyDeviceToHost));
            double sum = 0;
            for (size_t i = 0; i < visited.size(); ++i) {
                if (kernel == TWO_PASS) sum += i % 16 + 1;
                if (kernel != TWO_PASS || i % pr.tiles >= 16) sum += visited[i];
            }
            const double density = sum / (32.0 * pr.tiles * (pr.tiles + 1) / 2);
            printf("E %s tau %.2f    L=%6d  %9.3f ms  density %.4f  %6.1f TF/s of visited tiles\n", kernel == LAGGED ? "lagged    " : kernel == EXACT ? "exact     " : "two passes", tau, len, ms, density, sum * 4 * 128 * 128 * 128 / ms * 1e-9);
        }
    }
}

void time_others(int longest) {
    {
        // The dense tail: 128 rows against every key.
        Problem<B, 128> pr({1, 32, 8, longest, longest, true, 0});
        float* partial_out;
        s2o::RowState* partial_state;
        for (int splits : {8, 16, 33, 66}) {
            CHECK(cudaMalloc(&partial_out, 4 * pr.split_rows(longest - 128, splits) * 128));
            CHECK(cudaMalloc(&partial_state, 8 * pr.split_rows(longest - 128, splits)));
            const double ms = median_ms([&] { pr.split(longest - 128, splits, partial_out, partial_state); }, 15);
            printf("dense tail, %2d splits    L=%6d  %9.3f ms  %6.1f TF/s\n", splits, longest, ms, 4. * 128 * 128 * longest * 32 / ms * 1e-9);
            cudaFree(partial_out); cudaFree(partial_state);
        }
    }
    {
        Problem<B, 128> pr({1, 32, 8, 16384, 16384, false, 0});
        for (int heads : {4, 32}) {
            pr.p.attn.heads_per_section = heads;
            const double ms = median_ms([&] { pr.dense(); }, 15);
            printf("A dense non-causal       L= 16384  %9.3f ms  %6.1f TF/s  (%d heads a section)\n", ms, pr.flops() / ms * 1e-9, heads);
        }
        Problem<B, 64> p64({1, 32, 8, 32768, 32768, true, 0});
        const double m64 = median_ms([&] { p64.dense(); }, 15);
        printf("A dense causal D=64      L= 32768  %9.3f ms  %6.1f TF/s\n", m64, p64.flops() / m64 * 1e-9);
    }
}

int main(int argc, char** argv) {
    const char* mode = argc > 1 ? argv[1] : "all";
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (!strcmp(mode, "check") || !strcmp(mode, "small") || !strcmp(mode, "all")) {
        checks(!strcmp(mode, "small"));
        CHECK(cudaDeviceSynchronize());
        printf("%d passed, %d failed\n", passed, failed);
        if (failed && !getenv("TIME_ANYWAY")) return 1;
    }
    const bool time = !strcmp(mode, "time") || !strcmp(mode, "all");
    const int longest = argc > 2 ? atoi(argv[2]) : 131072;
    if (time || !strcmp(mode, "ladder")) time_ladder(longest);
    if (time || !strcmp(mode, "stop")) time_early_stop(longest);
    if (time) time_others(longest);
    return 0;
}
