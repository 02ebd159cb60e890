// The producer of keys and values in pages. A tile comes in boxes of rows that no page border cuts. Each lane of one warp
// finds the page of a box and issues its copies, because a single thread would wait for one page after the other.
#pragma once

namespace s2o::sm90 {

// Rows of a box: the largest power of two that divides the pages, at most a tile. The tensor maps have this size too.
template <class X>
__device__ __forceinline__ int rows_of_box(int page_len) {
    return min(page_len & -page_len, X::KEYS);
}

// As produce_tiles, by the first warp.
template <class X>
__device__ __forceinline__ void produce_pages(const SharedLayout<X>& shared, const CUtensorMap& map_q,
                                              const CUtensorMap& map_k, const CUtensorMap& map_v,
                                              const typename X::Params& p) {
    auto* control = shared.control;
    const int lane = threadIdx.x;
    const int box_rows = rows_of_box<X>(p.page_len);
    const bool copies = lane < X::KEYS / box_rows;
    RingPosition<X::STAGES> k_pos, v_pos;
    ItemQueue<X> queue(p);
    WorkItem w;

    // The row of this lane's box of a tile, which begins at position `token` of the sequence. Rows that do not exist are
    // loaded as zeros.
    auto row_of = [&](int token) {
        const int page_of_sequence = token / p.page_len;
        if (!copies || token >= w.sequence.k_len || page_of_sequence >= p.pages_per_sequence) return p.k_rows;
        const int page = p.pages[w.sequence.first_key + page_of_sequence];
        const int64_t row = int64_t(page) * p.page_len + (token - page_of_sequence * p.page_len);
        return page >= 0 && row < p.k_rows ? int(row) : p.k_rows;
    };
    auto load = [&](uint32_t tile, const CUtensorMap& map, uint64_t* full, int row) {
        const uint32_t bar = smem_address(full);
        if (lane == 0) mbarrier_arrive_expect_tx(bar, X::KV_BYTES);
        __syncwarp();
        if (!copies) return;
#pragma unroll
        for (int panel = 0; panel < X::PANELS; ++panel) {
            tma_load(tile + panel * X::KV_PANEL + lane * box_rows * 128, &map, bar, panel * 64, row, w.kv_head, 0);
        }
    };

    for (int sequence = 0;; ++sequence) {
        const uint32_t q_full = smem_address(&control->q_full);
        mbarrier_wait(smem_address(&control->q_empty), (sequence & 1) ^ 1);
        int item = 0;
        if (lane == 0) {
            item = queue.current(p, w);
            control->item[sequence & 1] = item;
            if (item < 0) {
                mbarrier_arrive(q_full);
            } else {
                mbarrier_arrive_expect_tx(q_full, X::Q_BYTES);
#pragma unroll
                for (int panel = 0; panel < X::PANELS; ++panel) {
                    tma_load(shared.q + panel * X::Q_PANEL, &map_q, q_full, panel * 64, w.q_start, w.head, w.batch);
                }
                queue.fetch(p);
            }
        }
        item = __shfl_sync(0xffffffffu, item, 0);
        if (item < 0) return;
        X::decode(p, item, w);

        int v_row = 0;
        for (int i = 0; i <= w.steps; ++i) {
            int k_row = 0;
            if (i < w.steps) {
                k_row = row_of(X::key_tile(w, i) * X::KEYS + lane * box_rows);
                mbarrier_wait(smem_address(&control->k_empty[k_pos.stage]), k_pos.parity ^ 1);
                load(shared.k_tile(k_pos.stage), map_k, &control->k_full[k_pos.stage], k_row);
                k_pos.advance();
            }
            if (i > 0) {
                mbarrier_wait(smem_address(&control->v_empty[v_pos.stage]), v_pos.parity ^ 1);
                load(shared.v_tile(v_pos.stage), map_v, &control->v_full[v_pos.stage], v_row);
                v_pos.advance();
            }
            v_row = k_row;
        }
    }
}

}  // namespace s2o::sm90
