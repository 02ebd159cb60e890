// A kernel with a plain name for the host to look up: S2O_KERNEL(name, T, head_dim, schedule, gather, stop, stages).
// `name_traits` holds its constants (shared memory) for C++ hosts.
#pragma once

#define S2O_KERNEL(name, ...)                                                                          \
    using name##_traits = s2o::Traits<__VA_ARGS__>;                                                    \
    extern "C" __global__ void __launch_bounds__(s2o::THREADS, 1)                                      \
        name(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,     \
             const __grid_constant__ CUtensorMap map_v, const __grid_constant__ name##_traits::Params p) { \
        s2o::attention<name##_traits>(map_q, map_k, map_v, p);                                         \
    }
