// The producer warpgroup of engine.cuh. Without a gather one thread issues TMA copies. With a gather all 128 threads
// copy, and every tile needs an arrival from each thread.
#pragma once

namespace s2o::sm90 {

template <class X>
__device__ __forceinline__ void tma_load_tile(uint32_t dst, const CUtensorMap& map, uint32_t bar, int token, int head,
                                              int batch) {
    mbarrier_arrive_expect_tx(bar, X::KV_BYTES);
#pragma unroll
    for (int panel = 0; panel < X::PANELS; ++panel) {
        tma_load(dst + panel * X::KV_PANEL, &map, bar, panel * 64, token, head, batch);
    }
}

// Finds the next item that exists, or -1. A CTA's first item is its block index; the others come from the counter.
template <class X>
struct ItemQueue {
    int num_items, item;
    __device__ __forceinline__ explicit ItemQueue(const typename X::Params& p)
        : num_items(X::num_items(p)), item(blockIdx.x) {}
    __device__ __forceinline__ void fetch(const typename X::Params& p) {
        item = gridDim.x + atomicAdd(attn_of(p).next_item, 1);
    }
    __device__ __forceinline__ int current(const typename X::Params& p, WorkItem& w) {
        while (item < num_items) {
            if (X::decode(p, item, w)) return item;
            fetch(p);
        }
        return -1;
    }
};

// Loads queries, keys and values of all items by TMA, from one thread.
template <class X>
__device__ __forceinline__ void produce_tiles(const SharedLayout<X>& shared, const CUtensorMap& map_q,
                                              const CUtensorMap& map_k, const CUtensorMap& map_v,
                                              const typename X::Params& p) {
    auto* control = shared.control;
    RingPosition<X::STAGES> k_pos, v_pos;
    ItemQueue<X> queue(p);
    WorkItem w;
    for (int sequence = 0;; ++sequence) {
        // Queries first: the consumers free them before the last values product, so this does not starve the rings.
        mbarrier_wait(smem_address(&control->q_empty), (sequence & 1) ^ 1);
        const uint32_t q_full = smem_address(&control->q_full);
        const int item = queue.current(p, w);
        control->item[sequence & 1] = item;
        if (item < 0) {
            mbarrier_arrive(q_full);
            return;
        }
        mbarrier_arrive_expect_tx(q_full, X::Q_BYTES);
#pragma unroll
        for (int panel = 0; panel < X::PANELS; ++panel) {
            tma_load(shared.q + panel * X::Q_PANEL, &map_q, q_full, panel * 64, w.q_start, w.head, w.batch);
        }
        queue.fetch(p);

        int v_token = 0;
        for (int i = 0; i <= w.steps; ++i) {
            int k_token = 0;
            if (i < w.steps) {
                k_token = X::key_tile(w, i) * X::KEYS + (X::SEQUENCES ? w.sequence.first_key : 0);
                mbarrier_wait(smem_address(&control->k_empty[k_pos.stage]), k_pos.parity ^ 1);
                tma_load_tile<X>(shared.k_tile(k_pos.stage), map_k, smem_address(&control->k_full[k_pos.stage]),
                                 k_token, w.kv_head, w.batch);
                k_pos.advance();
            }
            if (i > 0) {
                mbarrier_wait(smem_address(&control->v_empty[v_pos.stage]), v_pos.parity ^ 1);
                tma_load_tile<X>(shared.v_tile(v_pos.stage), map_v, smem_address(&control->v_full[v_pos.stage]),
                                 v_token, w.kv_head, w.batch);
                v_pos.advance();
            }
            v_token = k_token;
        }
    }
}

// Loads window tiles by TMA and prefix tiles (and permuted queries) by index. Ends an item early if the consumers stop.
template <class X>
__device__ __forceinline__ void produce_gathered(const SharedLayout<X>& shared, const CUtensorMap& map_q,
                                                 const CUtensorMap& map_k, const CUtensorMap& map_v,
                                                 const typename X::Params& p) {
    using T = typename X::T;
    const AttnParams& attn = attn_of(p);
    const int thread = threadIdx.x;
    const RowGather<X::HEAD_DIM> gather(thread);
    auto* control = shared.control;
    RingPosition<X::STAGES> k_pos, v_pos;
    ItemQueue<X> queue(p);
    WorkItem w = {};
    auto rows = [&](const void* x, const Strides& strides, int head) {
        return reinterpret_cast<const char*>(static_cast<const T*>(x) + w.batch * strides.batch + head * strides.head);
    };

    for (int sequence = 0;; ++sequence) {
        const uint32_t q_full = smem_address(&control->q_full);
        if (thread == 0) {
            mbarrier_wait(smem_address(&control->q_empty), (sequence & 1) ^ 1);
            const int item = queue.current(p, w);
            control->item[sequence & 1] = item;
            control->k_begin[sequence & 1] = k_pos.count;
            control->v_begin[sequence & 1] = v_pos.count;
            if constexpr (X::PERMUTES_QUERIES) {
                // In addition to the arrivals of all threads' copies: this arrival publishes the control block.
                mbarrier_arrive(q_full);
            } else {
                if (item >= 0) {
                    mbarrier_arrive_expect_tx(q_full, X::Q_BYTES);
#pragma unroll
                    for (int panel = 0; panel < X::PANELS; ++panel) {
                        tma_load(shared.q + panel * X::Q_PANEL, &map_q, q_full, panel * 64, w.q_start, w.head, w.batch);
                    }
                } else {
                    mbarrier_arrive(q_full);
                }
            }
            if (item >= 0) queue.fetch(p);
        }
        named_barrier_sync(PRODUCERS, WARPGROUP);
        const int item = *const_cast<volatile int*>(&control->item[sequence & 1]);
        if constexpr (X::PERMUTES_QUERIES) {
            if (item < 0) mbarrier_arrive(q_full);
        }
        if (item < 0) {
            // Copies that an early stop left unread may still be in flight to this block's memory.
            cp_async_wait_all();
            return;
        }
        X::decode(p, item, w);
        if constexpr (X::PERMUTES_QUERIES) {
            const int64_t head = int64_t(w.batch_head(attn)) * attn.q_len;
            // Slots past the end repeat the last row; they are not stored.
            const int row = p.q_perm[head + min(w.q_start + gather.slot, w.row_end - 1)];
            gather.load(shared.q, rows(attn.q, attn.q_strides, w.head), attn.q_strides.seq * sizeof(T), row);
            mbarrier_arrive_cp_async(q_full);
        }

        const char* k_rows = rows(attn.k, attn.k_strides, w.kv_head);
        const char* v_rows = rows(attn.v, attn.v_strides, w.kv_head);
        const uint32_t k_row_bytes = uint32_t(attn.k_strides.seq * sizeof(T));
        const uint32_t v_row_bytes = uint32_t(attn.v_strides.seq * sizeof(T));
        // Tokens of this thread's row slot: for the keys of step i, the values of step i - 1, and one step ahead.
        int k_index = 0, v_index = 0, next_index = 0;
        if (w.gather_from == 0 && (!X::ITEMS_MAY_BE_EMPTY || w.steps > 0)) next_index = w.kv_perm[gather.slot];
        bool stopped = false;
        for (int i = 0; i <= w.steps && !stopped; ++i) {
            v_index = k_index;
            k_index = next_index;
            const int ahead = i + 1 - w.gather_from;
            if (ahead >= 0 && i + 1 < w.steps) next_index = w.kv_perm[ahead * TILE_K + gather.slot];
            if (i < w.steps) {
                mbarrier_wait(smem_address(&control->k_empty[k_pos.stage]), k_pos.parity ^ 1);
                // Consumers that stop before step b mark its keys and free them unread. This releases the wait of step
                // b + STAGES here, so that every thread stops at the same step without a barrier.
                if constexpr (X::STOP != Stop::NEVER) {
                    stopped = *const_cast<volatile int*>(&control->stopped[k_pos.stage]) == sequence;
                }
                if (!stopped) {
                    const uint32_t full = smem_address(&control->k_full[k_pos.stage]);
                    if (i >= w.gather_from) {
                        gather.load(shared.k_tile(k_pos.stage), k_rows, k_row_bytes, k_index);
                        mbarrier_arrive_cp_async(full);
                    } else if (thread == 0) {
                        tma_load_tile<X>(shared.k_tile(k_pos.stage), map_k, full, X::key_tile(w, i) * TILE_K,
                                         w.kv_head, w.batch);
                    } else {
                        mbarrier_arrive(full);
                    }
                    k_pos.advance();
                }
            }
            // After a stop the values that the consumers still need, those of step i - STAGES - 1, have long been loaded.
            if (i > 0 && !stopped) {
                mbarrier_wait(smem_address(&control->v_empty[v_pos.stage]), v_pos.parity ^ 1);
                const uint32_t full = smem_address(&control->v_full[v_pos.stage]);
                if (i - 1 >= w.gather_from) {
                    gather.load(shared.v_tile(v_pos.stage), v_rows, v_row_bytes, v_index);
                    mbarrier_arrive_cp_async(full);
                } else if (thread == 0) {
                    tma_load_tile<X>(shared.v_tile(v_pos.stage), map_v, full, X::key_tile(w, i - 1) * TILE_K,
                                     w.kv_head, w.batch);
                } else {
                    mbarrier_arrive(full);
                }
                v_pos.advance();
            }
        }
    }
}

}  // namespace s2o::sm90

#include "paged_producer.cuh"

namespace s2o::sm90 {

template <class X>
__device__ __forceinline__ void produce(const SharedLayout<X>& shared, const CUtensorMap& map_q,
                                        const CUtensorMap& map_k, const CUtensorMap& map_v,
                                        const typename X::Params& p) {
    if constexpr (X::GATHERS_KEYS) {
        produce_gathered<X>(shared, map_q, map_k, map_v, p);
    } else if constexpr (X::PAGED) {
        if (threadIdx.x < 32) produce_pages<X>(shared, map_q, map_k, map_v, p);
    } else if (threadIdx.x == 0) {
        produce_tiles<X>(shared, map_q, map_k, map_v, p);
    }
}

}  // namespace s2o::sm90
