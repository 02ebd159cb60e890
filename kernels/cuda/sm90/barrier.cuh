// Hopper's synchronisation and copy engine: mbarriers, named barriers, TMA loads, register reallocation.
#pragma once
#include <cuda.h>
#include <cstdint>

#include "../shared_address.cuh"

namespace s2o::sm90 {

// ---- mbarriers, named by their shared-memory address ----

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Arrives once all earlier cp.async of this thread have completed. `noinc`: the arrival is part of the initial count.
__device__ __forceinline__ void mbarrier_arrive_cp_async(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    while (!mbarrier_try_wait(bar, parity)) {
    }
}

// A position in a ring of STAGES buffers. `parity` is that of the "full" barrier; "empty" waits on the opposite parity,
// so that the first round of a producer does not wait.
template <int STAGES>
struct RingPosition {
    uint32_t count = 0, stage = 0, parity = 0;
    __device__ __forceinline__ static RingPosition at(uint32_t count) {
        RingPosition pos;
        pos.count = count;
        pos.stage = count % STAGES;
        pos.parity = count / STAGES & 1;
        return pos;
    }
    __device__ __forceinline__ void advance() {
        ++count;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---- named barriers (id 0 is __syncthreads) ----

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// ---- copies ----

// Box at (d, token, head, batch) of a 4-D map; rows outside the tensor, negative ones too, arrive as zeros.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, int d, int token, int head,
                                         int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(d), "r"(token), "r"(head), "r"(batch)
        : "memory");
}
// The box at (d, token, 0, 0) of a 4-D map gets the tile at `src`, except for what lies outside the tensor. `bulk_commit`
// closes a group of such stores; they read the tile after a `fence_proxy_async` of those who wrote it.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t src, int d, int token) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %4}], [%1];" ::"l"(map), "r"(src),
                 "r"(d), "r"(token), "r"(0)
                 : "memory");
}
// `tma_store`, but the tile is added to what the box holds, rounded to its type.
__device__ __forceinline__ void tma_add(const CUtensorMap* map, uint32_t src, int d, int token) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %4}], [%1];" ::"l"(map),
        "r"(src), "r"(d), "r"(token), "r"(0)
        : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most this many of the thread's groups still read their tiles.
template <int GROUPS_LEFT>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS_LEFT) : "memory");
}
// Loads a multiple of 16 contiguous bytes.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies 16 bytes, bypassing L1; L2 fetches the whole 256-byte row with the first piece.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Orders this thread's view of ordinary shared-memory writes before its later tensor-core reads.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers ----

template <int N>
__device__ __forceinline__ void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace s2o::sm90
