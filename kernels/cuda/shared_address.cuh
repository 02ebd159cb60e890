// Shared-memory addresses in the form that PTX takes.
#pragma once
#include <cstdint>

namespace s2o {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace s2o
