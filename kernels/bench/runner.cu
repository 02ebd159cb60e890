// Checks the sm_90a kernels against reference.cuh, then times them. Build and use:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -o runner kernels/bench/runner.cu
//   runner [check|small|time|ladder|stop|all] [longest]      `small` is for compute-sanitizer
// Timing is refused when a check fails.
#include "attention_times.cuh"

int main(int argc, char** argv) {
    const char* mode = argc > 1 ? argv[1] : "all";
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (!strcmp(mode, "check") || !strcmp(mode, "small") || !strcmp(mode, "all")) {
        strcmp(mode, "small") ? all_checks() : small_checks();
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
