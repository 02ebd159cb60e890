// Checks the sm_90a kernels against reference.cuh. Build and use:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -o runner kernels/bench/runner.cu
//   runner [small]      `small` is for compute-sanitizer
#include "attention_checks.cuh"

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    argc > 1 && !strcmp(argv[1], "small") ? small_checks() : all_checks();
    CHECK(cudaDeviceSynchronize());
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
