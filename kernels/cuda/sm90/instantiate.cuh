// Kernels with plain names for the host to look up, s2o_<name>_<dtype>_<head_dim>, each with its LaunchInfo.
// `<kernel>_traits` holds its types for C++ hosts.
#pragma once

#define S2O_KERNEL(name, T, head_dim, ...)                                                              \
    using name##_traits = s2o::sm90::Traits<T, head_dim, __VA_ARGS__>;                           \
    extern "C" {                                                                                        \
    __constant__ s2o::LaunchInfo name##_launch = {s2o::sm90::THREADS, name##_traits::SHARED_BYTES, 1, 3, s2o::OVERLAPS, \
                                                  name##_traits::KEYS}; \
    }                                                                                                   \
    extern "C" __global__ void __launch_bounds__(s2o::sm90::THREADS, 1)                                       \
        name(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,      \
             const __grid_constant__ CUtensorMap map_v, const __grid_constant__ name##_traits::Params p) { \
        s2o::sm90::attention<name##_traits>(map_q, map_k, map_v, p);                                          \
    }

#define S2O_KERNELS(name, ...)                                     \
    S2O_KERNEL(name##_bf16_128, __nv_bfloat16, 128, __VA_ARGS__)   \
    S2O_KERNEL(name##_bf16_64, __nv_bfloat16, 64, __VA_ARGS__)     \
    S2O_KERNEL(name##_f16_128, __half, 128, __VA_ARGS__)           \
    S2O_KERNEL(name##_f16_64, __half, 64, __VA_ARGS__)

// For heads of more than 128 columns.
#define S2O_WIDE_KERNELS(name, head_dim, ...)                                \
    S2O_KERNEL(name##_bf16_##head_dim, __nv_bfloat16, head_dim, __VA_ARGS__) \
    S2O_KERNEL(name##_f16_##head_dim, __half, head_dim, __VA_ARGS__)
