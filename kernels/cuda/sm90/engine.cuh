// The attention engine of sm_90a: one persistent, warp-specialised kernel for dense and sparse attention.
//
// Warpgroup 0 loads: queries and window tiles by TMA, prefix tiles by gather (row_gather.cuh), into rings of STAGES key
// and STAGES value tiles. Warpgroups 1 and 2 compute 64 query rows each. Two overlaps keep the tensor cores busy:
//   - inside a warpgroup the scores of tile i are issued together with the values product of tile i-1, and the softmax
//     of tile i runs while the latter is still executing;
//   - between the two, named barriers let one issue its products while the other is in its softmax (ping-pong).
// A step visits one key tile: S = Q K^T, P = exp(S - row_max), acc += P V.
#pragma once
#include "../launch.cuh"
#include "../online_softmax.cuh"
#include "../params.cuh"
#include "../schedule.cuh"
#include "../score_modifiers.cuh"
#include "barrier.cuh"
#include "row_gather.cuh"
#include "stop_vote.cuh"
#include "wgmma.cuh"

namespace s2o::sm90 {

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_WARPS = CONSUMERS * 4;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
static_assert(CONSUMER_WARPS == VOTING_WARPS && CONSUMERS * 64 == TILE_Q, "each warp owns 16 rows of the tile");

// TURN and HIDDEN_VALUES: one for each consumer.
enum NamedBarrier { TURN = 1, PRODUCERS = 3, DECISION = 4, HIDDEN_VALUES = 5 };

// A kernel: element type, head size, and a schedule whose gathered steps may stop early.
template <typename T_, int HEAD_DIM_, class Schedule, Stop STOP_ = Stop::NEVER>
struct Traits : Schedule {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr Stop STOP = STOP_;
    static constexpr bool LAGS = STOP == Stop::LAGGED_GAINS || STOP == Stop::LAGGED_WEIGHTS;
    // With rows of 64 columns a step is shorter than the latency of a gather.
    static constexpr int STAGES = Schedule::GATHERS_KEYS && HEAD_DIM == 64 ? 3 : 2;
    static constexpr int PANELS = HEAD_DIM / 64;
    // Of a tile: next to accumulators of more than 128 columns, registers and shared memory hold half of a TILE_K.
    static constexpr int KEYS = HEAD_DIM > 128 ? TILE_K / 2 : TILE_K;
    static constexpr bool IS_HALVED = KEYS < TILE_K;
    static_assert(!IS_HALVED || !Schedule::GATHERS_KEYS && Schedule::OUTPUT == Output::NORMALISED);
    // Half of the diagonal tile's rows see none of its second half.
    static constexpr bool ROWS_MAY_BE_EMPTY = Schedule::ROWS_MAY_BE_EMPTY || IS_HALVED;
    // Of a thread; all threads together have those of the launch. Some producers need more.
    static constexpr int CONSUMER_REGISTERS = Schedule::PAGED || IS_HALVED ? 224 : 232;
    static constexpr int PRODUCER_REGISTERS = Schedule::PAGED || IS_HALVED ? 56 : 40;
    static constexpr uint32_t Q_PANEL = TILE_Q * 128, KV_PANEL = KEYS * 128;
    static constexpr uint32_t Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
    // SHARED_BYTES has 1024 more to align the tiles, and CONTROL_BYTES for the control block.
    static constexpr uint32_t CONTROL_BYTES = Schedule::SCATTERS_ROWS ? 1024 : 512;
    static constexpr uint32_t TILES_BYTES = Q_BYTES + 2 * STAGES * KV_BYTES;
    static constexpr uint32_t SHARED_BYTES = 1024 + TILES_BYTES + CONTROL_BYTES;

    // Keys that exist for the rows of an item.
    __device__ __forceinline__ static int num_keys(const AttnParams& attn, const WorkItem& w) {
        return Schedule::SEQUENCES ? w.sequence.k_len : attn.k_len;
    }
    // The schedule's item, in tiles of KEYS.
    __device__ __forceinline__ static bool decode(const typename Schedule::Params& p, int item, WorkItem& w) {
        const bool exists = Schedule::decode(p, item, w);
        if constexpr (IS_HALVED) {
            const int end = min(2 * (w.key_tile + 1), (num_keys(attn_of(p), w) + KEYS - 1) / KEYS);
            w.key_tile = end - 1;
            w.steps = w.gather_from = max(end, 0);
        }
        return exists;
    }
};

// Positions of the rows of a tile that are not consecutive: loaded once for an item.
template <bool SCATTERS_ROWS>
struct TilePositions {};
template <>
struct TilePositions<true> {
    int of_row[TILE_Q];
};

template <class X>
struct ControlBlock {
    static constexpr int STAGES = X::STAGES;
    uint64_t q_full, q_empty;
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    // For this item and the next, written by the producer before q_full. Item -1 is the end. Tiles in the ring before
    // the positions of the item's first tiles are stale.
    int item[2];
    uint32_t k_begin[2], v_begin[2];
    int stopped[STAGES];        // sequence number of the item whose early stop freed the keys of this stage unread
    union {
        LaggedVotes lagged;
        ExactVotes exact;
    } votes;
    TilePositions<X::SCATTERS_ROWS> positions;
};

// Shared-memory addresses, for both roles.
template <class X>
struct SharedLayout {
    static_assert(sizeof(ControlBlock<X>) <= X::CONTROL_BYTES);
    uint32_t q, k, v;
    ControlBlock<X>* control;
    __device__ __forceinline__ explicit SharedLayout(char* raw) {
        const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
        q = base;
        k = q + X::Q_BYTES;
        v = k + X::STAGES * X::KV_BYTES;
        control = reinterpret_cast<ControlBlock<X>*>(raw + (base - smem_address(raw)) + X::TILES_BYTES);
    }
    __device__ __forceinline__ uint32_t k_tile(uint32_t stage) const { return k + stage * X::KV_BYTES; }
    __device__ __forceinline__ uint32_t v_tile(uint32_t stage) const { return v + stage * X::KV_BYTES; }
};

}  // namespace s2o::sm90

#include "store.cuh"
#include "masks.cuh"
#include "tile_votes.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace s2o::sm90 {

// The body of every kernel; instantiate.cuh names the kernels.
template <class X>
__device__ __forceinline__ void attention(const CUtensorMap& map_q, const CUtensorMap& map_k, const CUtensorMap& map_v,
                                          const typename X::Params& p) {
    extern __shared__ char raw[];
    const SharedLayout<X> shared(raw);
    auto* control = shared.control;
    if (threadIdx.x == 0) {
        tma_prefetch_map(&map_q);
        tma_prefetch_map(&map_k);
        tma_prefetch_map(&map_v);
        mbarrier_init(smem_address(&control->q_full), X::PERMUTES_QUERIES ? WARPGROUP + 1 : 1);
        mbarrier_init(smem_address(&control->q_empty), CONSUMERS * WARPGROUP);
        for (int i = 0; i < X::STAGES; ++i) {
            mbarrier_init(smem_address(&control->k_full[i]), X::GATHERS_KEYS ? WARPGROUP : 1);
            mbarrier_init(smem_address(&control->v_full[i]), X::GATHERS_KEYS ? WARPGROUP : 1);
            mbarrier_init(smem_address(&control->k_empty[i]), CONSUMER_WARPS);
            mbarrier_init(smem_address(&control->v_empty[i]), CONSUMER_WARPS);
            control->stopped[i] = -1;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_proxy_async();
    }
    __syncthreads();
    // Blocks of the kernel after it would wait on multiprocessors that those of another share could use, so it may not start.
    after_previous();
    if (threadIdx.x < WARPGROUP) {
        registers_decrease<X::PRODUCER_REGISTERS>();
        produce<X>(shared, map_q, map_k, map_v, p);
    } else {
        registers_increase<X::CONSUMER_REGISTERS>();
        consume<X>(shared, p);
    }
}

}  // namespace s2o::sm90
