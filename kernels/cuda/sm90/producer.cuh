// The producer warpgroup of engine_sm90.cuh. Without a gather one thread issues TMA copies; with one all 128 take part,
// and every tile needs an arrival of each.
#pragma once

namespace s2o {

template <class X>
__device__ __forceinline__ void tma_load_tile(uint32_t dst, const CUtensorMap& map, uint32_t bar, int token, int head,
                                              int batch) {
    mbarrier_arrive_expect_tx(bar, X::KV_BYTES);
#pragma unroll
    for (int panel = 0; panel < X::PANELS; ++panel) {
        tma_load(dst + panel * X::KV_PANEL, &map, bar, panel * 64, token, head, batch);
    }
}

// The next item that exists, or -1. The first of a CTA is its block index, the others come from the counter.
template <class X>
struct ItemQueue {
    int num_items, item;
    __device__ __forceinline__ explicit ItemQueue(const typename X::Params& p)
        : num_items(X::Schedule::num_items(p)), item(blockIdx.x) {}
    __device__ __forceinline__ void fetch(const typename X::Params& p) {
        item = gridDim.x + atomicAdd(X::Schedule::dense(p).next_item, 1);
    }
    __device__ __forceinline__ int current(const typename X::Params& p, WorkItem& w) {
        while (item < num_items) {
            if (X::Schedule::decode(p, item, w)) return item;
            fetch(p);
        }
        return -1;
    }
};

template <class X>
__device__ __forceinline__ void produce(const SharedLayout<X>& shared, const CUtensorMap& map_q,
                                        const CUtensorMap& map_k, const CUtensorMap& map_v,
                                        const typename X::Params& p) {
    const int thread = threadIdx.x;
    if (!X::GATHER && thread != 0) return;
    auto* control = shared.control;
    RingPosition<X::STAGES> k_pos, v_pos;
    ItemQueue<X> queue(p);
    WorkItem w;

    for (int sequence = 0;; ++sequence) {
        // Queries first: the consumers free them before the last values product, so this does not starve the rings.
        if (thread == 0) {
            mbarrier_wait(smem_address(&control->q_empty), (sequence & 1) ^ 1);
            const int item = queue.current(p, w);
            control->item = item;
            control->k_begin = k_pos.count;
            control->v_begin = v_pos.count;
            const uint32_t q_full = smem_address(&control->q_full);
            if (item >= 0) {
                mbarrier_arrive_expect_tx(q_full, X::Q_BYTES);
#pragma unroll
                for (int panel = 0; panel < X::PANELS; ++panel) {
                    tma_load(shared.q + panel * X::Q_PANEL, &map_q, q_full, panel * 64, w.q_start, w.head, w.batch);
                }
                queue.fetch(p);
            } else {
                mbarrier_arrive(q_full);
            }
        }
        int item;
        if constexpr (X::GATHER) {
            named_barrier_sync(PRODUCERS, WARPGROUP);
            item = *const_cast<volatile int*>(&control->item);
            if (item >= 0) X::Schedule::decode(p, item, w);
        } else {
            item = control->item;
        }
        if (item < 0) return;

        const int steps = w.num_window + w.num_prefix;
        if constexpr (!X::GATHER) {
            for (int i = 0; i <= steps; ++i) {
                if (i < steps) {
                    mbarrier_wait(smem_address(&control->k_empty[k_pos.stage]), k_pos.parity ^ 1);
                    tma_load_tile<X>(shared.k_tile(k_pos.stage), map_k, smem_address(&control->k_full[k_pos.stage]),
                                     (w.window_last - i) * TILE_K, w.kv_head, w.batch);
                    k_pos.advance();
                }
                if (i > 0) {
                    mbarrier_wait(smem_address(&control->v_empty[v_pos.stage]), v_pos.parity ^ 1);
                    tma_load_tile<X>(shared.v_tile(v_pos.stage), map_v, smem_address(&control->v_full[v_pos.stage]),
                                     (w.window_last - i + 1) * TILE_K, w.kv_head, w.batch);
                    v_pos.advance();
                }
            }
        } else {
            const RowGather<X::HEAD_DIM> gather(thread);
            using T = typename X::T;
            const char* k_rows = reinterpret_cast<const char*>(static_cast<const T*>(p.k) + w.batch * p.k_batch_stride +
                                                               w.kv_head * p.k_head_stride);
            const char* v_rows = reinterpret_cast<const char*>(static_cast<const T*>(p.v) + w.batch * p.v_batch_stride +
                                                               w.kv_head * p.v_head_stride);
            const uint32_t k_row_bytes = uint32_t(p.k_seq_stride * sizeof(T));
            const uint32_t v_row_bytes = uint32_t(p.v_seq_stride * sizeof(T));
            // Tokens of this thread's row slot: of the keys of step i, of the values of step i-1, and one step ahead.
            int k_index = 0, v_index = 0, next_index = 0;
            bool stopped = false;
            for (int i = 0; i <= steps && !stopped; ++i) {
                v_index = k_index;
                k_index = next_index;
                const int ahead = i + 1 - w.num_window;
                if (ahead >= 0 && ahead < w.num_prefix) next_index = w.kv_perm[ahead * TILE_K + gather.slot];
                if (i < steps) {
                    mbarrier_wait(smem_address(&control->k_empty[k_pos.stage]), k_pos.parity ^ 1);
                    // Consumers that stop at step b free its keys once more, unread, after announcing b + STAGES: the
                    // very wait that this frees is step b + STAGES here. So every thread stops at the same step, without
                    // meeting; one that sees the announcement earlier goes on until then.
                    if constexpr (X::STOP) stopped = control->stops(sequence, i);
                    if (!stopped) {
                        const uint32_t full = smem_address(&control->k_full[k_pos.stage]);
                        if (i >= w.num_window) {
                            gather.load(shared.k_tile(k_pos.stage), k_rows, k_row_bytes, k_index);
                            mbarrier_arrive_cp_async(full);
                        } else if (thread == 0) {
                            tma_load_tile<X>(shared.k_tile(k_pos.stage), map_k, full, (w.window_last - i) * TILE_K,
                                             w.kv_head, w.batch);
                        } else {
                            mbarrier_arrive(full);
                        }
                        k_pos.advance();
                    }
                }
                // Also after a stop: the consumers still want the values of the last step they scored.
                if (i > 0) {
                    mbarrier_wait(smem_address(&control->v_empty[v_pos.stage]), v_pos.parity ^ 1);
                    const uint32_t full = smem_address(&control->v_full[v_pos.stage]);
                    if (i - 1 >= w.num_window) {
                        gather.load(shared.v_tile(v_pos.stage), v_rows, v_row_bytes, v_index);
                        mbarrier_arrive_cp_async(full);
                    } else if (thread == 0) {
                        tma_load_tile<X>(shared.v_tile(v_pos.stage), map_v, full, (w.window_last - i + 1) * TILE_K,
                                         w.kv_head, w.batch);
                    } else {
                        mbarrier_arrive(full);
                    }
                    v_pos.advance();
                }
            }
        }
    }
}

}  // namespace s2o
