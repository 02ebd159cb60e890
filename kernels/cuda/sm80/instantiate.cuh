// Kernels with plain names for the host to look up, and what it must know to launch them.
#pragma once
#include "engine.cuh"

namespace s2o::sm80 {

#ifndef S2O_BLOCKS_64
#define S2O_BLOCKS_64 2
#endif
constexpr int blocks_per_sm(int head_dim) { return head_dim == 128 ? 2 : S2O_BLOCKS_64; }

}  // namespace s2o::sm80

#define S2O_KERNEL(name, T, HEAD_DIM, Schedule, OUTPUT)                                                             \
    using name##_traits = s2o::sm80::Traits<T, HEAD_DIM, Schedule, s2o::sm80::Output::OUTPUT,                       \
                                            s2o::sm80::blocks_per_sm(HEAD_DIM)>;                                    \
    extern "C" {                                                                                                    \
    __constant__ s2o::LaunchInfo name##_launch = {s2o::sm80::THREADS, s2o::sm80::SharedLayout<name##_traits>::BYTES, \
                                                  name##_traits::BLOCKS_PER_SM, 0};                                 \
    __global__ void __launch_bounds__(s2o::sm80::THREADS, name##_traits::BLOCKS_PER_SM)                             \
        name(const __grid_constant__ name##_traits::Params p) {                                                     \
        s2o::sm80::attention<name##_traits>(p);                                                                     \
    }                                                                                                               \
    }

// One kernel for each element type and head_dim.
#define S2O_KERNELS(prefix, Schedule, OUTPUT)                            \
    S2O_KERNEL(prefix##_bf16_128, __nv_bfloat16, 128, Schedule, OUTPUT)  \
    S2O_KERNEL(prefix##_bf16_64, __nv_bfloat16, 64, Schedule, OUTPUT)    \
    S2O_KERNEL(prefix##_f16_128, __half, 128, Schedule, OUTPUT)          \
    S2O_KERNEL(prefix##_f16_64, __half, 64, Schedule, OUTPUT)
