// The epilogue: a consumer's accumulator to global memory.
#pragma once
#include <cstdint>

#include "wgmma_sm90.cuh"

namespace s2o {

// Four words of four lanes of a quad, transposed: lane c ends with word c of lanes 0..3.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int c) {
    uint32_t sent = (c & 1) ? w[0] : w[1];
    uint32_t got = __shfl_xor_sync(0xffffffffu, sent, 1);
    (c & 1) ? w[0] = got : w[1] = got;
    sent = (c & 1) ? w[2] : w[3];
    got = __shfl_xor_sync(0xffffffffu, sent, 1);
    (c & 1) ? w[2] = got : w[3] = got;
    sent = (c & 2) ? w[0] : w[2];
    got = __shfl_xor_sync(0xffffffffu, sent, 2);
    (c & 2) ? w[0] = got : w[2] = got;
    sent = (c & 2) ? w[1] : w[3];
    got = __shfl_xor_sync(0xffffffffu, sent, 2);
    (c & 2) ? w[1] = got : w[3] = got;
}

// Row h of this thread's two, times `factor`. A quad owns a row, 2 of each 8 columns per lane; after the transposition
// each lane writes 16 bytes and the quad 64 in a line.
template <typename T, int N>
__device__ __forceinline__ void store_row(const float (&acc)[N], int h, float factor, T* row, bool exists) {
    const int c = threadIdx.x & 3;
#pragma unroll
    for (int g = 0; g < N / 16; ++g) {
        uint32_t w[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int i = 16 * g + 4 * b + 2 * h;
            w[b] = pack<T>(acc[i] * factor, acc[i + 1] * factor);
        }
        transpose_quad(w, c);
        if (exists) *reinterpret_cast<uint4*>(row + 32 * g + 8 * c) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

}  // namespace s2o
