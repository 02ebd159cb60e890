// The compile-time parameters of a kernel of the engine, and its shared-memory layout.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../mma.cuh"
#include "../params.cuh"
#include "../schedule.cuh"
#include "../score_modifiers.cuh"

namespace s2o::sm80 {

constexpr int HALF_K = TILE_K / 2;  // keys loaded and scored at a time; more would leave no registers for `acc`

template <typename T_, int HEAD_DIM_, class Schedule>
struct Traits : Schedule {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    // Fragments of 16 rows in a warp: each loaded key fragment serves as many products. The accumulators of two with 128
    // columns, or of one with 256, fill the registers.
    static constexpr int FRAGMENTS = HEAD_DIM <= 128 ? 2 : 1;
    // Whether products of values run during exponentials of the same half tile, whose scores then occupy registers longer.
    static constexpr bool OVERLAPS = HEAD_DIM == 64 && !Schedule::MAY_STOP;
    // With OVERLAPS registers are left to keep the addresses of the heads, and shared memory to load keys and values
    // together: the two warps of a scheduler hide neither the latency of reading them again nor a second barrier.
    static constexpr bool HOLDS_HEADS = OVERLAPS, JOINS_VALUES = OVERLAPS;
    // Whether the thread's index stays in a register. With a head_dim of 128 kernels that cap scores have none left.
    static constexpr bool HOLDS_THREAD = OVERLAPS || (HEAD_DIM == 128 && !Schedule::MAY_STOP && !Schedule::CAPS_SCORES);
    // Visits in the body of the loop over the two visits of a step. With both the number of the visit is a constant.
    static constexpr int VISITS_UNROLLED = OVERLAPS ? 2 : 1;
    // One being read, the others in flight. With joined values three would leave one block on consumer cards.
    static constexpr int RING_SLOTS = JOINS_VALUES ? 2 : 3;
    // Whether the next load of keys follows the maxima of a half tile, and that of values the products, instead of coming
    // first. A kernel that may stop has no registers left for that, and with OVERLAPS it is no faster.
    static constexpr bool DEFERS_LOADS = !OVERLAPS && !Schedule::MAY_STOP;
    static constexpr int WARP_ROWS = 16 * FRAGMENTS, WARPS = TILE_Q / WARP_ROWS, THREADS = WARPS * 32;
    static constexpr int BLOCKS_PER_SM = HEAD_DIM <= 128 ? 2 : 1;
    static constexpr int ROW = HEAD_DIM * 2;        // bytes
    static constexpr int ROW_CHUNKS = HEAD_DIM / 8;  // of 16 bytes
    static constexpr uint32_t Q_BYTES = TILE_Q * ROW, HALF_BYTES = HALF_K * ROW;
    static constexpr uint32_t SLOT_BYTES = JOINS_VALUES ? 2 * HALF_BYTES : HALF_BYTES;
};

using s2o::thread_index;

template <class X>
__device__ __forceinline__ int thread_index() {
    if constexpr (X::HOLDS_THREAD) return threadIdx.x;
    return thread_index();
}

// A warp's part of a stop decision, which compares sums over rows, x < tau * y. MeanRatio: x sums gain / mass, y counts
// rows; SumRatio: x sums gains, y masses; AllRows, MaxWeight: x is 1 if all rows of the warp are below; MeanWeight: x is the
// largest gain / mass of its rows, or NaN.
using StopVote = float2;

// The first rows of the keys and the values of a head.
struct HeadRows {
    const char* of[2];
};

struct ItemModifiers {
    ScoreModifiers modifiers;  // of the item's head
};

template <class X>
struct Control : std::conditional_t<X::MODIFIES_SCORES, ItemModifiers, NoModifiers> {
    WorkItem work;
    HeadRows heads;           // of the item
    int item;                 // the next item
    bool end;                 // no more items
    StopVote votes[X::WARPS];  // of one key tile; the ring's barriers keep two tiles apart
    float tile_max[X::THREADS];  // the largest score of the tile for the own row of each thread; no register is left
};

template <class X>
struct SharedLayout {
    static constexpr uint32_t TILES_BYTES = X::Q_BYTES + X::RING_SLOTS * X::SLOT_BYTES;
    static constexpr uint32_t BYTES = TILES_BYTES + sizeof(Control<X>);
    // Each block has 1024 bytes more for the system. An A100 has 164 KiB, and other GPUs 100, which hold two blocks with a
    // head_dim of 64, one with 128, and none with 256.
    static_assert(X::BLOCKS_PER_SM * (BYTES + 1024) <= 164 * 1024);
    static_assert((X::HEAD_DIM == 64 ? 2 : 1) * (BYTES + 1024) <= 100 * 1024 || X::HEAD_DIM > 128);

    char* raw;
    __device__ __forceinline__ char* q() const { return raw; }
    __device__ __forceinline__ char* ring() const { return raw + X::Q_BYTES; }
    __device__ __forceinline__ Control<X>& control() const { return *reinterpret_cast<Control<X>*>(raw + TILES_BYTES); }
};

// The row of the call at row `r` of the tile, or -1.
template <class X>
__device__ __forceinline__ int row_of(const typename X::Params& p, const WorkItem& w, int r) {
    const int slot = w.q_start + r;
    if (slot < 0 || slot >= w.row_end) return -1;
    if constexpr (X::PERMUTES_QUERIES) {
        return p.q_perm[int64_t(w.batch_head(p.attn)) * p.attn.q_len + slot];
    } else {
        return slot;
    }
}

// The key tile of a step that does not gather. A permuted tile has no such step, but ptxas spills without this branch.
template <class X>
__device__ __forceinline__ int key_tile(const WorkItem& w, int step) {
    if constexpr (X::PERMUTES_QUERIES) {
        return 0;
    } else {
        return X::key_tile(w, step);
    }
}

}  // namespace s2o::sm80
