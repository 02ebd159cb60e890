// The same checks for the sm_80 engine, which needs no tensor maps and decides before the next tile:
//   nvcc -std=c++17 -O3 -gencode arch=compute_80,code=compute_80 -o runner80 kernels/bench/sm80.cu
#define S2O_SM80
#include "runner.cu"
