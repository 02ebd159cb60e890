// Launch settings of a kernel, stored in its module as symbol `<kernel>_launch`, so that the host repeats no constant.
#pragma once
#include <cstdint>

namespace s2o {

struct LaunchInfo {
    int32_t threads;       // of a block
    int32_t shared_bytes;  // dynamic
    int32_t blocks_per_sm; // of a persistent kernel; the grid of others is documented at the kernel
    int32_t tensor_maps;   // TMA descriptors before the parameters (queries, keys, values), or 0
};
static_assert(sizeof(LaunchInfo) == 16, "mirrored on the host");

}  // namespace s2o
