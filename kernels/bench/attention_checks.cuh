// The checks of runner.cu: outputs, log-sum-exps and visited tiles against reference.cuh, and two launches bit for bit.
#pragma once
#include <cstring>
#include <random>

#include "problem.cuh"

// Every row_step-th row of the reference: (batch, rows, heads, D) and (batch, heads, rows).
struct Expected {
    int rows, row_step;
    Buffer<float> out, lse;
    Expected(const Case& c, int head_dim, int row_step = 1)
        : rows((c.q_len + row_step - 1) / row_step),
          row_step(row_step),
          out(int64_t(c.batch) * rows * c.heads * head_dim),
          lse(int64_t(c.batch) * rows * c.heads) {}
};

// Dense attention, or attention on the blocks of a mask.
template <typename T, int D>
void expect_dense(const Problem<T, D>& pr, Expected& expected, const uint8_t* blocks = nullptr) {
    reference::dense<T, D><<<dim3(expected.rows, pr.c.heads, pr.c.batch), 32>>>(
        pr.p.attn, expected.rows, expected.row_step, blocks, expected.out, expected.lse);
    CHECK(cudaGetLastError());
}

// Checks the relative Frobenius error of the reference's rows and the absolute error of lse. NaN fails.
template <typename T, int D>
void compare(const char* what, Problem<T, D>& pr, const Expected& expected) {
    const Case& c = pr.c;
    const auto out = fetch(pr.out.data, pr.out.count);
    const auto lse = fetch(pr.lse.data, pr.lse.count);
    const auto want = fetch(expected.out.data, expected.out.count);
    const auto want_lse = fetch(expected.lse.data, expected.lse.count);
    double diff = 0, norm = 0, worst_row = 0, lse_err = 0;
    for (int b = 0; b < c.batch; ++b) {
        for (int r = 0; r < expected.rows; ++r) {
            for (int h = 0; h < c.heads; ++h) {
                const int row = std::min(r * expected.row_step, c.q_len - 1);
                const int64_t at = b * pr.out.strides.batch + row * pr.out.strides.seq + h * pr.out.strides.head;
                double rd = 0, rn = 0;
                for (int d = 0; d < D; ++d) {
                    const double x = float(out[at + d]);
                    const double y = want[((int64_t(b) * expected.rows + r) * c.heads + h) * D + d];
                    rd += (x - y) * (x - y);
                    rn += y * y;
                }
                diff += rd;
                norm += rn;
                if (rn == 0 && rd == 0) continue;  // a row without keys
                if (!(rd / rn <= worst_row)) worst_row = rd / rn;
                const int64_t head = int64_t(b) * c.heads + h;
                const double e = fabs(lse[head * c.q_len + row] - want_lse[head * expected.rows + r]);
                if (!(e <= lse_err)) lse_err = e;
            }
        }
    }
    const double rel = norm > 0 ? sqrt(diff / norm) : sqrt(diff), worst = sqrt(worst_row);
    const bool ok = rel < 5e-3 && worst < 2e-2 && lse_err < 2e-3;
    ok ? ++passed : ++failed;
    if (!ok || getenv("VERBOSE")) {
        printf("%s %s b%d h%d/%d q%d k%d causal%d layout%d D%d: rel %.2e worst row %.2e lse %.2e\n",
               ok ? "ok  " : "FAIL", what, c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, c.layout, D, rel,
               worst, lse_err);
    }
}

// Checks that a second launch gives the same bits.
template <typename T, int D, class F>
void check_repeatable(const char* what, Problem<T, D>& pr, F launch) {
    const auto first = fetch(pr.out.data, pr.out.count);
    pr.poison();
    launch();
    const auto second = fetch(pr.out.data, pr.out.count);
    const bool same = !memcmp(first.data(), second.data(), first.size() * sizeof(T));
    same ? ++passed : ++failed;
    if (!same) printf("FAIL %s: two launches differ\n", what);
}

// Launches on poisoned memory, compares, and launches again.
template <typename T, int D, class F>
void check_launch(const char* what, Problem<T, D>& pr, const Expected& expected, bool twice, F launch) {
    pr.poison();
    launch();
    CHECK(cudaDeviceSynchronize());
    compare(what, pr, expected);
    if (twice) check_repeatable(what, pr, launch);
}

template <typename T, int D>
void check_dense(const Case& c, float std = 1.f) {
    Problem<T, D> pr(c, std);
    Expected expected(c, D, c.q_len > 4096 ? c.q_len / 61 : 1);
    expect_dense(pr, expected);
    check_launch("dense", pr, expected, c.q_len > 4096, [&] { pr.dense(); });
}

enum Kernel { FULL, LAGGED, EXACT, TWO_PASS };
inline const char* KERNEL_NAMES[] = {"single pass full", "single pass", "single pass exact", "two passes"};

struct Rule {
    float tau;
    int rule = s2o::ALL_ROWS, literal = 0, discard = 0;
};

inline int64_t decisions = 0, decisions_that_differ = 0;

// Runs every segment in groups of `group`, and the rows from c.q_len - tail on as dense attention split over the keys.
template <typename T, int D>
void check_s2o(const Case& c, int segment_len, float std, Kernel kernel, std::vector<Rule> rules, int tail = 0,
               int group = 1000) {
    Problem<T, D> pr(c, std, segment_len);
    pr.p.ranked_rows = std::max(0, c.q_len - tail);
    const int64_t n = pr.slots();
    Expected expected(c, D);
    Buffer<int32_t> expected_visited(n);
    if (kernel == TWO_PASS) pr.permute_queries();
    for (int random = 0; random < 2; ++random) {
        for (const Rule& rule : rules) {
            pr.p.tau = rule.tau;
            pr.p.stop_rule = rule.rule;
            pr.p.literal_frame = rule.literal;
            pr.p.discard = rule.discard;
            expect_dense(pr, expected);  // first, because it also fills the tail's rows
            expected_visited.fill(0xff);
            auto launch = [&](bool reference_too) {
                for (int end = pr.call_segment + pr.call_segments; end > pr.call_segment; end -= group) {
                    const int first = std::max(pr.call_segment, end - group);
                    pr.segments(first, end - first);
                    pr.permute(random);
                    if (reference_too) {
                        reference::s2o_attention<T, D>
                            <<<dim3(n / (c.batch * c.heads), c.heads, c.batch), s2o::TILE_Q>>>(
                                pr.p, kernel == LAGGED ? LAG : 0, kernel == TWO_PASS, expected.out, expected.lse,
                                expected_visited);
                    }
                    CHECK(cudaGetLastError());
                    if (kernel == FULL) pr.single_pass_full();
                    if (kernel == LAGGED) pr.single_pass();
                    if (kernel == EXACT) pr.single_pass_exact();
                    if (kernel == TWO_PASS) pr.two_pass();
                }
                if (tail) pr.split(pr.p.ranked_rows, 3);
                CHECK(cudaDeviceSynchronize());
            };
            pr.poison();
            launch(true);
            const auto a = fetch(pr.visited.data, n), b = fetch(expected_visited.data, n);
            int64_t differ = 0, sum = 0, want = 0, counted = 0;
            for (int64_t i = 0; i < n; ++i) {
                differ += a[i] != b[i];
                counted += b[i] >= 0;
                sum += a[i] * (b[i] >= 0);
                want += b[i] * (b[i] >= 0);
            }
            decisions += counted;
            decisions_that_differ += differ;
            if (differ || getenv("VERBOSE")) {
                printf("  %s tau %g rule %d literal %d discard %d: tiles visited %ld, reference %ld, items "
                       "that differ %ld of %ld\n",
                       KERNEL_NAMES[kernel], rule.tau, rule.rule, rule.literal, rule.discard, long(sum), long(want),
                       long(differ), long(counted));
            }
            // An item that stops elsewhere, within rounding of the threshold, has another result and is not compared.
            if (differ == 0) compare(KERNEL_NAMES[kernel], pr, expected);
            check_repeatable(KERNEL_NAMES[kernel], pr, [&] { launch(false); });
        }
    }
}

// Rows first_row.. are split over the keys, with the lse; the dense kernel computes the other rows.
template <typename T, int D>
void check_split(const Case& c, int first_row, int splits) {
    Problem<T, D> pr(c);
    Expected expected(c, D);
    expect_dense(pr, expected);
    check_launch("split", pr, expected, true, [&] {
        if (first_row) pr.dense();
        pr.split(first_row, splits);
    });
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
        for (int j = last; j >= 0; --j) {
            if (random() < share * 4294967295.f && i % 5) {
                mask[i * key_blocks + j] = 1;
                list.push_back(j);
            }
        }
        ranges.push_back(list.size());
    }
    const Buffer<uint8_t> device_mask(mask);
    const Buffer<int32_t> device_list(list);
    const Buffer<int64_t> device_ranges(ranges);
    Expected expected(c, D);
    expect_dense(pr, expected, device_mask);
    check_launch("blocks", pr, expected, true, [&] { pr.blocks(device_list, device_ranges); });
}

// Every key by index, not causal, in natural and in random order.
inline void check_ladder(const Case& c) {
    Problem<__nv_bfloat16, 128> pr(c, 1.f, 128);
    Expected expected(c, 128);
    expect_dense(pr, expected);
    for (bool random : {false, true}) {
        for (bool asks : {false, true}) {
            pr.permute_all(random);
            check_launch("ladder", pr, expected, false, [&] { pr.ladder(asks); });
        }
    }
}

// For compute-sanitizer.
inline void small_checks() {
    using B = __nv_bfloat16;
    check_dense<B, 128>({1, 2, 1, 300, 300, true, 0});
    check_dense<B, 128>({2, 2, 2, 77, 333, true, 1});
    check_dense<__half, 64>({1, 1, 1, 130, 200, false, 2});
    for (Kernel kernel : {FULL, LAGGED, EXACT, TWO_PASS}) {
        std::vector<Rule> rules = {{kernel == FULL ? 0.f : .7f}};
        if (kernel >= EXACT) rules.push_back({.5f, s2o::MEAN_RATIO, 0, 1});
        check_s2o<B, 128>({1, 2, 1, 900, 900, true, 0}, 256, 1.f, kernel, rules, 70);
    }
    check_split<B, 128>({1, 2, 1, 150, 500, true, 0}, 0, 3);
    check_blocks<B, 128>({1, 2, 1, 300, 500, true, 0}, .5f);
}

inline void all_checks() {
    using B = __nv_bfloat16;
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
    check_ladder({1, 4, 2, 640, 640, false, 0});
    check_ladder({2, 4, 1, 500, 1024, false, 1});
    printf("split, blocks and ladder: %d failed\n", failed - dense_failed);
    const std::vector<Rule> all = {{0.f},
                                   {.2f},
                                   {.5f},
                                   {.2f, s2o::MEAN_RATIO},
                                   {.3f, s2o::SUM_RATIO, 1},
                                   {.3f, s2o::ALL_ROWS, 0, 1},
                                   {.25f, s2o::MEAN_RATIO, 0, 1},
                                   {.2f, s2o::SUM_RATIO, 0, 1},
                                   {.4f, s2o::ALL_ROWS, 1}};
    for (Kernel kernel : {FULL, LAGGED, EXACT, TWO_PASS}) {
        std::vector<Rule> rules = all;
        if (kernel == FULL) rules = {{0.f}};
        if (kernel == LAGGED) rules = {{0.f}, {.2f}, {.5f}};
        check_s2o<B, 128>({1, 4, 2, 1280, 1280, true, 0}, 256, 1.f, kernel, rules);
        check_s2o<B, 128>({2, 4, 1, 1000, 1000, true, 1}, 128, 2.f, kernel, rules, 300, 2);
        check_s2o<B, 128>({1, 8, 2, 555, 1777, true, 2}, 512, 1.f, kernel, rules, 64, 1);
        check_s2o<B, 64>({1, 2, 2, 1500, 1500, true, 0}, 256, 1.f, kernel, rules, 1);
        check_s2o<__half, 128>({1, 2, 2, 1500, 1500, true, 0}, 256, 1.f, kernel, rules, 128, 4);
        check_s2o<__half, 64>({3, 2, 1, 700, 701, true, 1}, 128, 1.f, kernel, rules, 1000);
        check_s2o<B, 128>({1, 4, 2, 2048, 2048, true, 0}, 128, .5f, kernel, rules);
        if (kernel != FULL) rules = {{.02f}, {.1f}};
        check_s2o<B, 128>({1, 16, 4, 4096, 4096, true, 0}, 512, 3.f, kernel, rules, 128);
        printf("%s done: %d failed\n", KERNEL_NAMES[kernel], failed);
    }
    printf("%ld stop decisions, %ld differ from the reference\n", long(decisions), long(decisions_that_differ));
    if (decisions_that_differ * 1000 > decisions) ++failed;
}
