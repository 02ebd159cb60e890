// Kernels with plain names for the host to look up, s2o_<name>_<dtype>_<head_dim>, each with its LaunchInfo.
// `<kernel>_traits` holds its types for C++ hosts.
#pragma once
#include "engine.cuh"

#define S2O_KERNEL(name, T, head_dim, Schedule)                                                                 \
    using name##_traits = s2o::sm80::Traits<T, head_dim, Schedule>; \
    extern "C" {                                                                                                \
    __constant__ s2o::LaunchInfo name##_launch = {                                                              \
        name##_traits::THREADS, s2o::sm80::SharedLayout<name##_traits>::BYTES, name##_traits::BLOCKS_PER_SM, 0}; \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(name##_traits::THREADS, name##_traits::BLOCKS_PER_SM)          \
        name(const __grid_constant__ name##_traits::Params p) {                                                 \
        s2o::sm80::attention<name##_traits>(p);                                                                 \
    }

#define S2O_KERNELS(name, Schedule)                                    \
    S2O_KERNEL(name##_bf16_128, __nv_bfloat16, 128, Schedule)          \
    S2O_KERNEL(name##_bf16_64, __nv_bfloat16, 64, Schedule)            \
    S2O_KERNEL(name##_f16_128, __half, 128, Schedule)                  \
    S2O_KERNEL(name##_f16_64, __half, 64, Schedule)

// For head_dim 256.
#define S2O_WIDE_KERNELS(name, Schedule)                               \
    S2O_KERNEL(name##_bf16_256, __nv_bfloat16, 256, Schedule)          \
    S2O_KERNEL(name##_f16_256, __half, 256, Schedule)

// For every head_dim, with softcap.
#define S2O_CAPPED_KERNELS(name, Schedule)                     \
    S2O_KERNELS(name##_capped, s2o::Capped<Schedule>)          \
    S2O_WIDE_KERNELS(name##_capped, s2o::Capped<Schedule>)
