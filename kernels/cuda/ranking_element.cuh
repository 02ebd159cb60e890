// The ranking's operations on an element type, two elements in a 32-bit word.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace s2o {

// Two NaNs of either type.
constexpr uint32_t NAN_WORD = 0x7fff7fff;

template <typename T>
struct Packed;

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <>
struct Packed<__nv_bfloat16> {
    static constexpr bool NARROW_RANGE = false;
    __device__ static __forceinline__ float2 floats(uint32_t word) {
        return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
    }
    // Nonzero if an element is not finite: such an element times zero is NaN.
    __device__ static __forceinline__ uint32_t not_finite(uint4 x) {
        uint32_t sum = 0;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(words[i]), "r"(0u));
        return sum & NAN_WORD;
    }
    __device__ static __forceinline__ uint32_t squares_bf16(uint32_t word) {
        uint32_t square;
        asm("fma.rn.bf16x2 %0, %1, %1, %2;" : "=r"(square) : "r"(word), "r"(0u));
        return square;
    }
};

template <>
struct Packed<__half> {
    static constexpr bool NARROW_RANGE = true;
    __device__ static __forceinline__ float2 floats(uint32_t word) {
        return __half22float2(*reinterpret_cast<const __half2*>(&word));
    }
    __device__ static __forceinline__ uint32_t not_finite(uint4 x) {
        uint32_t sum = 0;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(words[i]), "r"(0u));
        return sum & NAN_WORD;
    }
    // The square of an f16 number may overflow f16.
    __device__ static __forceinline__ uint32_t squares_bf16(uint32_t word) {
        const float2 x = floats(word);
        return pack_bf16(x.x * x.x, x.y * x.y);
    }
};

}  // namespace s2o
