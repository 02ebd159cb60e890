// Two elements of T in one register, the first in the low half.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace s2o {

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t r;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    } else {
        return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    }
}

}  // namespace s2o
