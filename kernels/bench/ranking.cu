// Checks the ranking kernels against ranking_reference.cuh, then times them. Build and use:
//   nvcc -std=c++20 -O3 -arch=sm_90 -o ranking kernels/bench/ranking.cu
//   ranking [check|small|time|tune|once|all]      `small` is for compute-sanitizer, `once` for a profiler
// Timing is refused when a check fails. Times are medians of CUDA-event timings of all launches of a whole ranking.
#include <string>

#include "ranking_checks.cuh"

const Case LONG{1, 32, 8, 131072, 131072, 128, 2048};

struct Times {
    float total, moments, scores, sort;
};
template <typename T = __nv_bfloat16, int D = 128>
Times time_ranking(const Case& c, int repeats = 15) {
    Ranking<T, D> r(c);
    Times t{};
    t.total = median_ms([&] { r.rank_all(); }, repeats, 3);
    t.moments = median_ms([&] { r.moments(); }, repeats, 3);
    for (auto& g : r.groups) {
        r.set_group(g);
        t.scores += median_ms([&] { r.scores(g); }, repeats, 0);
        // The sort overwrites the scores.
        t.sort += median_ms([&] { r.sort(g); }, repeats, 0, [&] { r.scores(g); });
    }
    return t;
}

void print_times(const char* what, const Case& c) {
    const Times t = time_ranking(c);
    printf("%-10s L %6d S %4d  %-10s total %.3f ms  (moments %.3f scores %.3f sort %.3f)\n", what, c.k_len,
           c.segment_len, name_of(c.data), t.total, t.moments, t.scores, t.sort);
}

void time_all() {
    for (int length = 4096; length <= 131072; length *= 2) {
        for (int segment = 512; segment <= 4096; segment *= 2) {
            if (segment < length) print_times("bf16", {1, 32, 8, length, length, 128, segment});
        }
    }
    for (Data data : {Data::Skewed, Data::Offset, Data::Constant, Data::TwoValued}) {
        Case c = LONG;
        c.data = data;
        print_times("bf16", c);
    }
    Case mean_query = LONG, last = LONG;
    mean_query.c = 0;
    last.q_len = 8192;
    print_times("mean query", mean_query);
    print_times("last 8K", last);
}

// Launch settings at 128K, S = 2048.
void tune() {
    Case c = LONG;
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
    Ranking<__nv_bfloat16, 128> r(LONG);
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
