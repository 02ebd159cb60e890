// Checks the ranking kernels against ranking_reference.cuh. Build and use:
//   nvcc -std=c++20 -O3 -arch=sm_90 -o ranking kernels/bench/ranking.cu
//   ranking [small]      `small` is for compute-sanitizer
#include <string>

#include "ranking_checks.cuh"

int main(int argc, char** argv) {
    argc > 1 && std::string(argv[1]) == "small" ? check_small() : check_all();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
