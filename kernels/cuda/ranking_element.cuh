// The ranking's operations on an element type, two elements in a 32-bit word.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace s2o {

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
    static constexpr uint32_t NAN_WORD = 0x7fff7fff;
    __device__ static __forceinline__ float2 floats(uint32_t word) {
        return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
    }
    // Nonzero if an element is not finite: such an element times zero is NaN.
    __device__ static __forceinline__ uint32_t not_finite(uint4 x) {
        uint32_t sum = 0;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(words[i]), "r"(0u));
        return sum & 0x7fff7fff;
    }
    __device__ static __forceinline__ uint32_t squares_bf16(uint32_t word) {
        uint32_t square;
        asm("fma.rn.bf16x2 %0, %1, %1, %2;" : "=r"(square) : "r"(word), "r"(0u));
        return square;
    }
    __device__ static __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <>
struct Packed<__half> {
    static constexpr bool NARROW_RANGE = true;
    static constexpr uint32_t NAN_WORD = 0x7fff7fff;
    __device__ static __forceinline__ float2 floats(uint32_t word) {
        return __half22float2(*reinterpret_cast<const __half2*>(&word));
    }
    __device__ static __forceinline__ uint32_t not_finite(uint4 x) {
        uint32_t sum = 0;
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(words[i]), "r"(0u));
        return sum & 0x7fff7fff;
    }
    // The square of an f16 number may overflow f16.
    __device__ static __forceinline__ uint32_t squares_bf16(uint32_t word) {
        const float2 x = floats(word);
        return pack_bf16(x.x * x.x, x.y * x.y);
    }
    __device__ static __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

}  // namespace s2o
