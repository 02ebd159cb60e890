// The ring of half tiles of keys and values, filled by cp.async from consecutive rows or by index.
//
// Loads come in the order of the reads: for each visit of a half tile its keys, then its values, in the same slot with
// JOINS_VALUES. A step of the ring costs one barrier, after which the slot to be filled next has been read.
#pragma once
#include "traits.cuh"

namespace s2o::sm80 {

// DISCARD: see `attend`.
template <class X, bool DISCARD>
class Loader {
    using Params = typename X::Params;
    // Eight threads copy a row, 16 bytes each at a time: more would have more rows each, and so more addresses.
    static constexpr int LANES = 8;
    static constexpr int ROWS_APART = X::THREADS / LANES;
    static constexpr int ROWS = HALF_K / ROWS_APART;  // of a thread
    static constexpr uint32_t RING_BYTES = X::RING_SLOTS * X::SLOT_BYTES;

    // These members occupy registers next to the accumulators, so they are few; the item, and without HOLDS_HEADS its heads,
    // are read from shared memory.
    const Params& p;
    const WorkItem& w;
    std::conditional_t<X::HOLDS_HEADS, const HeadRows, const HeadRows&> heads;
    uint32_t ring;
    uint32_t read = 0;       // slot, in bytes
    uint32_t next_load = 0;  // 8 * step + 2 * visit + (1 for values)
    // For the next load, fetched one load ahead: the thread's first token. If the kernel gathers, one of its tokens;
    // the threads that copy a row exchange their rows' tokens. k_len if nothing is left to load.
    int index;

    __device__ __forceinline__ int step() const { return next_load >> 3; }
    __device__ __forceinline__ bool gathers() const { return X::GATHERS_KEYS && step() >= w.gather_from; }

    __device__ __forceinline__ void fetch_index() {
        index = attn_of(p).k_len;
        if (step() >= w.steps) return;
        const int thread = thread_index<X>();
        const int half = (next_load >> 1 & 1) * HALF_K;
        const int slot = half + thread / LANES + (X::GATHERS_KEYS ? ROWS_APART * (thread % ROWS) : 0);
        if (gathers()) {
            index = w.kv_perm[(step() - w.gather_from) * TILE_K + slot];
        } else {
            index = key_tile<X>(w, step()) * TILE_K + slot;
        }
    }
    __device__ __forceinline__ static void copy_row(uint32_t dst, const char* row, bool exists) {
#pragma unroll
        for (int offset = 0; offset < X::ROW; offset += LANES * 16) cp_async_16(dst + offset, row + offset, exists);
    }
    __device__ __forceinline__ void copy(uint32_t slot, bool values) const {
        const AttnParams& attn = attn_of(p);
        const int thread = thread_index<X>(), line = thread / LANES, chunk = thread % LANES;
        const uint64_t row_bytes = (values ? attn.v_strides.seq : attn.k_strides.seq) * 2;
        const char* rows = heads.of[values] + chunk * 16;
        // ROWS_APART is a multiple of 8, so that all rows of a thread have the same swizzle.
        const uint32_t dst = ring + slot + line * X::ROW + ((chunk ^ (line & 7)) << 4);
        // Zeros beyond the last key: garbage times a probability of zero may be NaN.
        if constexpr (X::GATHERS_KEYS) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const uint32_t token = __shfl_sync(0xffffffffu, index, i, LANES);
                copy_row(dst + i * ROWS_APART * X::ROW, rows + token * row_bytes, token < attn.k_len);
            }
        } else {
            rows += index * row_bytes;
            const int rows_left = attn.k_len - index;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                copy_row(dst + i * ROWS_APART * X::ROW, rows, i * ROWS_APART < rows_left);
                rows += ROWS_APART * row_bytes;
            }
        }
    }
    __device__ __forceinline__ void load(uint32_t slot) {
        if constexpr (X::JOINS_VALUES) {
            copy(slot, false);
            copy(slot + X::HALF_BYTES, true);
        } else {
            copy(slot, next_load & 1);
        }
        cp_async_commit();
        const uint32_t in_step = next_load & 7;
        if constexpr (X::JOINS_VALUES) {
            next_load += in_step == 0 ? 2 : 6;
        } else if (DISCARD && gathers()) {
            next_load += in_step == 0 ? 2 : in_step == 5 ? 3 : 1;
        } else {
            next_load += in_step == 3 ? 5 : 1;
        }
        fetch_index();
    }

public:
    __device__ __forceinline__ Loader(const SharedLayout<X>& shared, const Params& p)
        : p(p), w(shared.control().work), heads(shared.control().heads), ring(smem_address(shared.ring())) {
        fetch_index();
    }
    __device__ __forceinline__ void start() {
        for (int i = 0; i < X::RING_SLOTS - 1; ++i) load(i * X::SLOT_BYTES);
    }
    // Waits until every warp can read the next slot, and returns its address. The slot before it has then been read;
    // `refill` must follow.
    __device__ __forceinline__ uint32_t next() {
        cp_async_wait<X::RING_SLOTS - 2>();
        __syncthreads();
        if constexpr (!X::DEFERS_LOADS) load(read == 0 ? RING_BYTES - X::SLOT_BYTES : read - X::SLOT_BYTES);
        const uint32_t address = ring + read;
        read = read == RING_BYTES - X::SLOT_BYTES ? 0 : read + X::SLOT_BYTES;
        return address;
    }
    // With DEFERS_LOADS, loads a half tile into the slot that has been read.
    __device__ __forceinline__ void refill() {
        if constexpr (!X::DEFERS_LOADS) return;
        constexpr uint32_t AHEAD = (X::RING_SLOTS - 2) * X::SLOT_BYTES;
        load(read + AHEAD < RING_BYTES ? read + AHEAD : read + AHEAD - RING_BYTES);
    }
};

}  // namespace s2o::sm80
