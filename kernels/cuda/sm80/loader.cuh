// Keys and values on their way: a ring of half tiles filled by cp.async, from consecutive rows or by index.
//
// The order of the loads is the order of the reads: for each visit of a half tile its keys, then its values. All threads
// load; a step of the ring costs one barrier, which also says that the slot about to be filled has been read.
#pragma once
#include "traits.cuh"

namespace s2o::sm80 {

template <class X>
class Loader {
    using Params = typename X::Params;
    static constexpr int ROWS_APART = THREADS / X::ROW_CHUNKS;  // ROW_CHUNKS threads copy a row
    static constexpr int ROWS_PER_THREAD = HALF_K / ROWS_APART;
    static constexpr uint32_t RING_BYTES = RING_SLOTS * X::SLOT_BYTES;

    // Everything here lives in registers beside the accumulators: few words, the rest is read from `control`.
    const Params& p;
    const Control& control;
    uint32_t ring;
    uint32_t read = 0;  // slot, in bytes
    uint32_t next_load = 0;  // 8 * step + 2 * visit + (1 for values)
    // Of the next load: its key tile, or one token of it when it gathers (the threads that copy a row pass their rows'
    // tokens around). Fetched one load ahead.
    int index;

    __device__ __forceinline__ int step() const { return next_load >> 3; }
    __device__ __forceinline__ int half() const { return next_load >> 1 & 1; }
    __device__ __forceinline__ bool gathers() const { return X::GATHER && step() >= control.work.gather_from; }
    __device__ __forceinline__ static int row() { return threadIdx.x / X::ROW_CHUNKS; }

    __device__ __forceinline__ void fetch_index() {
        const WorkItem& w = control.work;
        if (step() >= w.steps) return;
        if (gathers()) {
            const int slot = row() + ROWS_APART * (threadIdx.x % ROWS_PER_THREAD);
            index = w.kv_perm[int64_t(step() - w.gather_from) * TILE_K + half() * HALF_K + slot];
        } else if constexpr (!X::PERMUTED) {
            index = X::Schedule::key_tile(w, step());
        }
    }
    __device__ __forceinline__ void advance() {
        const uint32_t in_step = next_load & 7;
        if (scores_twice<X>(p, control.work, step())) {
            next_load += in_step == 0 ? 2 : in_step == 5 ? 3 : 1;
        } else {
            next_load += in_step == 3 ? 5 : 1;
        }
        fetch_index();
    }

    __device__ __forceinline__ void load(uint32_t slot) {
        if (step() < control.work.steps) {
            const AttnParams& attn = X::Schedule::attn(p);
            const bool values = next_load & 1;
            const char* rows = control.rows[values] + threadIdx.x % X::ROW_CHUNKS * 16;
            const uint64_t row_bytes = (values ? attn.v_strides.seq : attn.k_strides.seq) * 2;
            // ROWS_APART is a multiple of 8: one swizzle for all rows of a thread.
            const uint32_t dst =
                ring + slot + row() * X::ROW + ((threadIdx.x % X::ROW_CHUNKS ^ (row() & 7)) << 4);
            if (gathers()) {
                const int group = threadIdx.x % 32 / X::ROW_CHUNKS * X::ROW_CHUNKS;
#pragma unroll
                for (int i = 0; i < ROWS_PER_THREAD; ++i) {
                    const uint32_t key = __shfl_sync(0xffffffffu, index, group + i);
                    cp_async_16(dst + i * ROWS_APART * X::ROW, rows + uint64_t(key) * row_bytes, true);
                }
            } else {
                const int first_key = index * TILE_K + half() * HALF_K, key = first_key + row();
                const char* src = rows + key * row_bytes;
                if (first_key + HALF_K <= attn.k_len) {
#pragma unroll
                    for (int i = 0; i < ROWS_PER_THREAD; ++i) {
                        cp_async_16(dst + i * ROWS_APART * X::ROW, src, true);
                        src += ROWS_APART * row_bytes;
                    }
                } else {
                    // Zeros beyond the last key: garbage times a probability of zero may be NaN.
#pragma unroll 1
                    for (int i = 0; i < ROWS_PER_THREAD; ++i) {
                        const bool exists = key + i * ROWS_APART < attn.k_len;
                        cp_async_16(dst + i * ROWS_APART * X::ROW, exists ? src : rows, exists);
                        src += ROWS_APART * row_bytes;
                    }
                }
            }
            advance();
        }
        cp_async_commit();  // empty at the end, so that the wait can count
    }

public:
    __device__ __forceinline__ Loader(const SharedLayout<X>& shared, const Params& p)
        : p(p), control(shared.control()), ring(smem_address(shared.ring())) {
        fetch_index();
    }
    __device__ __forceinline__ void start() {
        for (int i = 0; i < RING_SLOTS - 1; ++i) load(i * X::SLOT_BYTES);
    }
    // The address of the next half tile, once it is there for every warp.
    __device__ __forceinline__ uint32_t next() {
        cp_async_wait<RING_SLOTS - 2>();
        __syncthreads();
        load(read == 0 ? RING_BYTES - X::SLOT_BYTES : read - X::SLOT_BYTES);
        const uint32_t address = ring + read;
        read = read == RING_BYTES - X::SLOT_BYTES ? 0 : read + X::SLOT_BYTES;
        return address;
    }
};

}  // namespace s2o::sm80
