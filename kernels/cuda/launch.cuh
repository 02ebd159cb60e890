// Launch settings of a kernel, stored in its module as symbol `<kernel>_launch`, so that the host repeats no constant.
#pragma once
#include <cstdint>

namespace s2o {

struct LaunchInfo {
    int32_t threads;       // of a block
    int32_t shared_bytes;  // dynamic
    int32_t blocks_per_sm; // of a persistent kernel; the grid of others is documented at the kernel
    int32_t tensor_maps;   // TMA descriptors before the parameters (queries, keys, values), or 0
    int32_t overlaps;      // OVERLAPS for a kernel that calls `after_previous`, or 0
    int32_t box_rows;      // most rows of keys and values that it copies at once through a TMA descriptor, or 0
};
static_assert(sizeof(LaunchInfo) == 24, "mirrored on the host");

// Programmatic dependent launch, which hides the launch of short kernels. A kernel with OVERLAPS may be scheduled while the
// kernel before it still runs. So it calls `after_previous` before it touches memory that another kernel writes, or writes
// itself; all earlier kernels have then ended. `next_may_start` allows the same to the kernel after it; `overlap` is both.
// GPUs before compute capability 9.0 have neither.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int32_t OVERLAPS = 1;
__device__ __forceinline__ void after_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
constexpr int32_t OVERLAPS = 0;
__device__ __forceinline__ void after_previous() {}
__device__ __forceinline__ void next_may_start() {}
#endif
__device__ __forceinline__ void overlap() {
    next_may_start();
    after_previous();
}

}  // namespace s2o
