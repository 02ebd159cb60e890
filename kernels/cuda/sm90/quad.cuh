// Exchanges between the four lanes that hold a row of a wgmma product.
#pragma once
#include <cstdint>

namespace s2o::sm90 {

// Transposes the four words of the four lanes of a quad: lane c gets word c of lanes 0..3. Its own inverse.
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

}  // namespace s2o::sm90
