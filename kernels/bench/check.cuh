// What the runners share: CUDA calls that end the program if they fail, and pseudo-random bits of a number.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t e = (call);                                                                  \
        if (e != cudaSuccess) {                                                                  \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e));         \
            exit(2);                                                                             \
        }                                                                                        \
    } while (0)

__device__ inline uint32_t mix(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdull; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ull; x ^= x >> 33;
    return uint32_t(x);
}
