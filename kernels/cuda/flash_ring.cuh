// The compile-time sizes of `flash`, its shared memory, and the ring of tiles of keys and values.
#pragma once
#include "flash_item.cuh"
#include "mma.cuh"
#include "score_modifiers.cuh"

namespace s2o::flash {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_LARGE_SHARED = true;  // 227 KiB in a block
#else
constexpr bool HAS_LARGE_SHARED = false;
#endif

template <typename T_, int HEAD_DIM_>
struct Traits {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int PARTS = HEAD_DIM > 256 ? 2 : 1, V_DIM = HEAD_DIM / PARTS;
    // The accumulators of two fragments of 16 rows and 128 columns fill the registers. With one fragment, eight warps
    // share the tiles of keys and values if they fit, but for 256 two blocks of four are faster.
    static constexpr int FRAGMENTS = HEAD_DIM <= 128 ? 2 : 1;
    static constexpr bool IS_LARGE = HAS_LARGE_SHARED && HEAD_DIM > 128 && HEAD_DIM < 256;
    static constexpr int WARPS = IS_LARGE ? 8 : 4, THREADS = WARPS * 32;
    static constexpr int BLOCKS_PER_SM = IS_LARGE || PARTS == 2 ? 1 : 2;
    // Whether products of values run during exponentials of the same tile: larger heads leave no registers for its scores.
    static constexpr bool OVERLAPS = HEAD_DIM <= 96;
    // Whether exponentials are computed a step ahead of their products, whose operands then take twice the registers.
    static constexpr bool AHEAD = HEAD_DIM <= 64;
    static constexpr int WARP_ROWS = 16 * FRAGMENTS, ROWS = WARPS * WARP_ROWS;
    static constexpr int ROW = (HEAD_DIM + 63) / 64 * 128;  // bytes: whole swizzled blocks of 64 columns
    static constexpr int RING_SLOTS = HEAD_DIM <= 128 || IS_LARGE ? 3 : 2;
    static constexpr uint32_t Q_BYTES = ROWS * ROW, SLOT_BYTES = KEYS * ROW, RING_BYTES = RING_SLOTS * SLOT_BYTES;
    // Threads that copy a row, 16 bytes each at a time, and the times that they do so.
    static constexpr int LANES = 8;
    static constexpr int PASSES = (HEAD_DIM + 8 * LANES - 1) / (8 * LANES);
    static constexpr int LINES = THREADS / LANES;
};

struct Control {
    Item item;
    ScoreModifiers modifiers;  // of its head
    int next;  // index of the next item
    bool end;  // no more items
};

template <class X>
struct Shared {
    static constexpr uint32_t BYTES = X::Q_BYTES + X::RING_BYTES + sizeof(Control);
    // In the 227 KiB of an H100; in the portable build up to head_dim 256 one block in the 99 KiB of consumer cards.
    static_assert(X::BLOCKS_PER_SM * (BYTES + 1024) <= 227 * 1024);
    static_assert(HAS_LARGE_SHARED || X::PARTS == 2 || BYTES <= 99 * 1024);
    char* raw;
    __device__ __forceinline__ char* q() const { return raw; }
    __device__ __forceinline__ uint32_t ring() const { return smem_address(raw + X::Q_BYTES); }
    __device__ __forceinline__ Control& control() const {
        return *reinterpret_cast<Control*>(raw + X::Q_BYTES + X::RING_BYTES);
    }
};

// Of the item's part of the output.
template <class X>
__device__ __forceinline__ int first_column(const Item& w) {
    return X::PARTS == 1 ? 0 : w.part * X::V_DIM;
}

// Calls f(row of the tile, address in shared memory of 16 bytes of it, their first column) for the rows of a warp and
// COLUMNS columns.
template <class X, int COLUMNS, class F>
__device__ __forceinline__ void for_each_chunk(char* q, F f) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int pass = 0; pass < X::PASSES; ++pass) {
        const int chunk = lane % X::LANES + pass * X::LANES;
        if (8 * chunk >= COLUMNS) continue;
#pragma unroll
        for (int i = 0; i < X::WARP_ROWS * X::LANES / 32; ++i) {
            const int r = warp * X::WARP_ROWS + i * (32 / X::LANES) + lane / X::LANES;
            f(r, q + r * X::ROW + ((chunk ^ (r & 7)) << 4), 8 * chunk);
        }
    }
}

// The ring of tiles of keys and values, filled by cp.async, in the order of the reads: the keys of the last tile, its
// values, the keys of the tile before it.
template <class X>
class Ring {
    static constexpr int LOADED_ROWS = KEYS / X::LINES;  // of a thread
    const FlashParams& p;
    const Item& w;
    const char* rows[2];  // keys and values of the item's head
    uint32_t ring, read = 0;
    int next_load = 0;  // 2 * (tiles before it) + (1 for values)
    // For the next load: the thread's first row, or NO_LIMIT beyond the first tile. With pages: one of its rows, or -1; the
    // threads that copy a row exchange their rows.
    int index;

    __device__ __forceinline__ void fetch_index() {
        const int line = thread_index() / X::LANES, lane = thread_index() % X::LANES;
        const int tile = w.end_tile - 1 - (next_load >> 1);
        int key = tile * KEYS + line;
        if (p.pages == nullptr) {
            index = tile >= w.key_tile ? w.k_base + key : NO_LIMIT;
            return;
        }
        key += X::LINES * (lane % LOADED_ROWS);
        index = -1;
        if (tile < w.key_tile || key >= w.k_len) return;
        const int n = key / p.page_len;
        const int page = n < p.pages_per_sequence ? p.pages[int64_t(w.batch) * p.pages_per_sequence + n] : -1;
        // A page that does not exist is read as zeros.
        const int64_t row = int64_t(page) * p.page_len + (key - n * p.page_len);
        index = page >= 0 && row < p.k_rows ? int(row) : -1;
    }
    __device__ __forceinline__ void load(uint32_t slot) {
        const int line = thread_index() / X::LANES, lane = thread_index() % X::LANES;
        const bool values = next_load & 1;
        const int64_t row_bytes = 2 * (values ? p.v_strides.seq : p.k_strides.seq);
        const int columns =
            X::PARTS > 1 && values ? min(p.head_dim - first_column<X>(w), X::V_DIM) : p.head_dim;
        const char* const from = rows[values] + lane * 16;
        const uint32_t to = ring + slot + line * X::ROW;
        auto copy = [&](int i, const char* source, bool exists) {
#pragma unroll
            for (int pass = 0; pass < X::PASSES; ++pass) {
                const int chunk = lane + pass * X::LANES;
                if (8 * chunk >= (values ? X::V_DIM : X::HEAD_DIM)) continue;
                // LINES is a multiple of 8, so that all rows of a thread have the same swizzle.
                const uint32_t address = to + i * X::LINES * X::ROW + ((chunk ^ (line & 7)) << 4);
                const bool copies = exists && 8 * chunk < columns;
                cp_async_16(address, copies ? source + pass * X::LANES * 16 : rows[values], copies);
            }
        };
        if (p.pages == nullptr) {
            const char* source = from + index * row_bytes;
            const int end = w.k_base + w.k_len;
#pragma unroll
            for (int i = 0; i < LOADED_ROWS; ++i) {
                copy(i, source, index + i * X::LINES < end);
                source += X::LINES * row_bytes;
            }
        } else {
#pragma unroll
            for (int i = 0; i < LOADED_ROWS; ++i) {
                const int row = __shfl_sync(0xffffffffu, index, i, X::LANES);
                copy(i, from + max(row, 0) * row_bytes, row >= 0);
            }
        }
        cp_async_commit();
        ++next_load;
        // Values have the rows of their keys.
        if ((next_load & 1) == 0) fetch_index();
    }

public:
    __device__ __forceinline__ Ring(const Shared<X>& shared, const FlashParams& p)
        : p(p), w(shared.control().item), ring(shared.ring()) {
        const int64_t k = p.q_starts != nullptr ? 0 : w.batch * p.k_strides.batch;
        const int64_t v = p.q_starts != nullptr ? 0 : w.batch * p.v_strides.batch;
        rows[0] = static_cast<const char*>(p.k) + 2 * (k + w.kv_head * p.k_strides.head);
        rows[1] = static_cast<const char*>(p.v) + 2 * (v + w.kv_head * p.v_strides.head + first_column<X>(w));
        fetch_index();
    }
    __device__ __forceinline__ void start() {
        for (int i = 0; i < X::RING_SLOTS - 1; ++i) load(i * X::SLOT_BYTES);
    }
    // Waits until every warp can read the next tile, and returns its address.
    __device__ __forceinline__ uint32_t next() {
        cp_async_wait<X::RING_SLOTS - 2>();
        __syncthreads();
        load(read == 0 ? X::RING_BYTES - X::SLOT_BYTES : read - X::SLOT_BYTES);
        const uint32_t address = ring + read;
        read = read == X::RING_BYTES - X::SLOT_BYTES ? 0 : read + X::SLOT_BYTES;
        return address;
    }
};

}  // namespace s2o::flash
