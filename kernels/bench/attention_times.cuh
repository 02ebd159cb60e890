// The times of runner.cu: medians of CUDA-event timings, one launch each, on random data.
#pragma once
#include "attention_checks.cuh"

// Medians of two launches timed alternately, so that both see the same clocks.
template <class F, class G>
std::pair<double, double> paired_ms(F first, G second, int runs) {
    std::vector<double> a, b;
    for (int i = 0; i < runs; ++i) {
        a.push_back(median_ms(first, 1, i == 0 ? 2 : 0));
        b.push_back(median_ms(second, 1, i == 0 ? 2 : 0));
    }
    return {median(a), median(b)};
}

inline int runs(int len) { return len >= 131072 ? 5 : len >= 65536 ? 9 : 41; }
using B = __nv_bfloat16;

template <class F>
void time_step(const char* name, Problem<B, 128>& pr, F step) {
    const auto [dense, ms] = paired_ms([&] { pr.dense(); }, step, runs(pr.c.k_len));
    printf("%s  L=%6d  %9.3f ms  %6.1f TF/s  A %9.3f ms: x%.3f\n", name, pr.c.k_len, ms, pr.flops() / ms * 1e-9, dense,
           ms / dense);
}

inline void time_ladder(int longest) {
    for (int len : {8192, 32768, 65536, 131072}) {
        if (len > longest) break;
        Problem<B, 128> pr({1, 32, 8, len, len, true, 0}, 1.f, 2048);
        pr.permute(false);
        time_step("B gather, identity      ", pr, [&] { pr.single_pass_full(); });
        pr.permute(true);
        time_step("C gather, random        ", pr, [&] { pr.single_pass_full(); });
        pr.p.tau = 1e-30f;
        time_step("  exact stop, never     ", pr, [&] { pr.single_pass_exact(); });
        time_step("D random, stop voted    ", pr, [&] { pr.single_pass(); });
        Problem<B, 128> full({1, 32, 8, len, len, false, 0}, 1.f, 2048);
        full.permute_all(false);
        time_step("B identity, not causal  ", full, [&] { full.ladder(false); });
        full.permute_all(true);
        time_step("C random, not causal    ", full, [&] { full.ladder(false); });
        time_step("D stop voted, not causal", full, [&] { full.ladder(true); });
    }
}

// Every prefix tile is random here, so the vote depends on tau alone. This measures how fast tiles are skipped.
inline void time_early_stop(int len) {
    Problem<B, 128> pr({1, 32, 8, len, len, true, 0}, 1.f, 2048);
    pr.permute(true);
    pr.permute_queries();
    for (int kernel = LAGGED; kernel <= TWO_PASS; ++kernel) {
        for (float tau : {.02f, .05f, .1f}) {
            pr.p.tau = tau;
            const double ms = median_ms(
                [&] {
                    if (kernel == LAGGED) pr.single_pass();
                    if (kernel == EXACT) pr.single_pass_exact();
                    if (kernel == TWO_PASS) pr.two_pass();
                },
                runs(len));
            const auto visited = fetch(pr.visited.data, int64_t(32) * pr.tiles);
            double sum = 0;
            for (size_t i = 0; i < visited.size(); ++i) {
                if (kernel == TWO_PASS) sum += i % 16 + 1;
                if (kernel != TWO_PASS || i % pr.tiles >= 16) sum += visited[i];
            }
            const double density = sum / (32.0 * pr.tiles * (pr.tiles + 1) / 2);
            printf("E %-17s tau %.2f    L=%6d  %9.3f ms  density %.4f  %6.1f TF/s of visited tiles\n",
                   KERNEL_NAMES[kernel], tau, len, ms, density, sum * 4 * 128 * 128 * 128 / ms * 1e-9);
        }
    }
}

inline void time_others(int longest) {
    {
        // The dense tail: 128 rows against every key.
        Problem<B, 128> pr({1, 32, 8, longest, longest, true, 0});
        for (int splits : {8, 16, 33, 66}) {
            const double ms = median_ms([&] { pr.split(longest - 128, splits); }, 15);
            printf("dense tail, %2d splits    L=%6d  %9.3f ms  %6.1f TF/s\n", splits, longest, ms,
                   4. * 128 * 128 * longest * 32 / ms * 1e-9);
        }
    }
    {
        Problem<B, 128> pr({1, 32, 8, 16384, 16384, false, 0});
        for (int heads : {4, 32}) {
            pr.p.attn.heads_per_section = heads;
            const double ms = median_ms([&] { pr.dense(); }, 15);
            printf("A dense non-causal       L= 16384  %9.3f ms  %6.1f TF/s  (%d heads a section)\n", ms,
                   pr.flops() / ms * 1e-9, heads);
        }
    }
    Problem<B, 64> p64({1, 32, 8, 32768, 32768, true, 0});
    const double ms = median_ms([&] { p64.dense(); }, 15);
    printf("A dense causal D=64      L= 32768  %9.3f ms  %6.1f TF/s\n", ms, p64.flops() / ms * 1e-9);
}
