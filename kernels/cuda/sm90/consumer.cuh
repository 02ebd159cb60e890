// A consumer warpgroup of engine_sm90.cuh: 64 query rows against the item's key tiles.
#pragma once

namespace s2o {

// S = Q K^T for 64 rows: started, not awaited.
template <class X>
__device__ __forceinline__ void issue_scores(float (&s)[TILE_K / 2], uint64_t q, uint64_t k) {
    using T = typename X::T;
#pragma unroll
    for (int step = 0; step < X::HEAD_DIM / 16; ++step) {
        const uint64_t dq = descriptor_step((step / 4) * X::Q_PANEL + (step % 4) * 32);
        const uint64_t dk = descriptor_step((step / 4) * X::KV_PANEL + (step % 4) * 32);
        if (step == 0) {
            wgmma_ss<T, 0>(s, q + dq, k + dk);
        } else {
            wgmma_ss<T, 1>(s, q + dq, k + dk);
        }
    }
    wgmma_commit();
}

// acc += P V: started, not awaited.
template <class X>
__device__ __forceinline__ void issue_values(float (&acc)[X::HEAD_DIM / 2], const uint32_t (&p)[TILE_K / 4], uint64_t v) {
#pragma unroll
    for (int step = 0; step < TILE_K / 16; ++step) {
        wgmma_rs<typename X::T>(acc, p + 4 * step, v + descriptor_step(step * 2048));
    }
    wgmma_commit();
}

// The accumulator layout of S is the operand layout of P: packing in pairs is all.
template <typename T>
__device__ __forceinline__ void pack_probabilities(const float (&s)[TILE_K / 2], uint32_t (&p)[TILE_K / 4]) {
#pragma unroll
    for (int i = 0; i < TILE_K / 4; ++i) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

template <class X>
__device__ __forceinline__ void await_tile(uint32_t bar, uint32_t parity) {
    mbarrier_wait(bar, parity);
    if (X::GATHER && S2O_CONSUMER_PROXY_FENCE) fence_proxy_async();
}

// Frees what an early stop left in a ring.
template <int STAGES>
__device__ __forceinline__ void drain(RingPosition<STAGES>& pos, uint32_t begin, const uint64_t* full,
                                      const uint64_t* empty, bool leader) {
    while (pos.count != begin) {
        mbarrier_wait(smem_address(&full[pos.stage]), pos.parity);
        if (leader) mbarrier_arrive(smem_address(&empty[pos.stage]));
        pos.advance();
    }
}

template <class X>
__device__ __forceinline__ void consume(const SharedLayout<X>& shared, const typename X::Params& p) {
    using T = typename X::T;
    constexpr int ACC = X::HEAD_DIM / 2;
    auto* control = shared.control;
    const DenseParams& dense = X::Schedule::dense(p);
    const int wg = threadIdx.x / WARPGROUP - 1;
    const int warp = (threadIdx.x / 32) % 4;
    const int lane = threadIdx.x % 32;
    const bool leader = lane == 0;
    const int row0 = wg * 64 + warp * 16 + lane / 4;  // in the tile; the other row is 8 further
    const float scale_log2 = dense.softmax_scale * 1.4426950408889634f;
    const int my_turn = TURN + wg, other_turn = TURN + 1 - wg;

    RingPosition<X::STAGES> k_pos, v_pos;
    const uint64_t q_desc = descriptor_k_major(shared.q + wg * 64 * 128);
    auto k_desc = [&] { return descriptor_k_major(shared.k_tile(k_pos.stage)); };
    auto v_desc = [&] { return descriptor_n_major(shared.v_tile(v_pos.stage), X::KV_PANEL); };
    auto await_k = [&] { await_tile<X>(smem_address(&control->k_full[k_pos.stage]), k_pos.parity); };
    auto await_v = [&] { await_tile<X>(smem_address(&control->v_full[v_pos.stage]), v_pos.parity); };
    auto free_k = [&] {
        if (leader) mbarrier_arrive(smem_address(&control->k_empty[k_pos.stage]));
        k_pos.advance();
    };
    auto free_v = [&] {
        if (leader) mbarrier_arrive(smem_address(&control->v_empty[v_pos.stage]));
        v_pos.advance();
    };
    auto free_q = [&] {
        mbarrier_arrive(smem_address(&control->q_empty));  // every thread, for every thread has read the item
    };

    if (wg == 1) named_barrier_arrive(TURN, 2 * WARPGROUP);  // the first turn is the first warpgroup's

    for (int sequence = 0;; ++sequence) {
        mbarrier_wait(smem_address(&control->q_full), sequence & 1);
        const int item = control->item;
        if (item < 0) return;
        WorkItem w;
        X::Schedule::decode(p, item, w);
        const int steps = w.num_window + w.num_prefix;
        const bool exists[2] = {unsigned(w.q_start + row0) < unsigned(dense.q_len),
                                unsigned(w.q_start + row0 + 8) < unsigned(dense.q_len)};
        if constexpr (X::STOP) {
            drain(k_pos, control->k_begin, control->k_full, control->k_empty, leader);
            drain(v_pos, control->v_begin, control->v_full, control->v_empty, leader);
        }

        OnlineSoftmax softmax;
        float s[TILE_K / 2];
        float acc[ACC];
        uint32_t probs[TILE_K / 4];
        float rescale[2], tile_sum[2];
#pragma unroll
        for (int i = 0; i < ACC; ++i) acc[i] = 0.f;

        // Step 0: the only one with a mask.
        await_k();
        wgmma_fence();
        issue_scores<X>(s, q_desc, k_desc());
        wgmma_wait<0>();
        pin(s);
        free_k();
        if (steps == 1) free_q();
        {
            const int column = 2 * (lane % 4);
            const int limit0 = (dense.causal ? row0 : w.tail_limit) - column;
            const int limit1 = (dense.causal ? row0 + 8 : w.tail_limit) - column;
#pragma unroll
            for (int i = 0; i < TILE_K / 2; ++i) {
                if (8 * (i >> 2) + (i & 1) > ((i & 2) ? limit1 : limit0)) s[i] = -INFINITY;
            }
        }
        softmax.update(s, scale_log2, rescale, tile_sum);
        pack_probabilities<T>(s, probs);
        if (X::STOP && leader) control->votes.warp[0][wg * 4 + warp] = 0;

        int i = 1;
        bool stopped = false;  // before step i; the values of step i - 1 are then done
        for (; i < steps; ++i) {
            await_k();
            named_barrier_sync(my_turn, 2 * WARPGROUP);
            wgmma_fence();
            issue_scores<X>(s, q_desc, k_desc());
            await_v();
            wgmma_fence();
            issue_values<X>(acc, probs, v_desc());
            named_barrier_arrive(other_turn, 2 * WARPGROUP);
            if constexpr (X::STOP) {
                // Asked after the products are issued, where its latency is hidden. A stop throws the scores of step i
                // away: half a tile of work for each item that stops, instead of a delay in every step.
                if (i >= 2 && control->votes.all(i - 2)) {
                    wgmma_wait<0>();
                    pin(s);
                    pin(acc);
                    stopped = true;
                    break;
                }
            }
            wgmma_wait<1>();
            pin(s);
            free_k();
            if (i == steps - 1) free_q();
            const float before[2] = {softmax.row_sum[0], softmax.row_sum[1]};
            softmax.update(s, scale_log2, rescale, tile_sum);
            wgmma_wait<0>();
            pin(acc);
            free_v();
            // The vote's shuffles and the packing share a basic block: one hides the other's latency.
            bool below = false;
            if constexpr (X::STOP) {
                const float mass[2] = {before[0] * rescale[0], before[1] * rescale[1]};
                below = rows_below(tile_sum, mass, exists, p.tau) && i >= w.num_window;
            }
            pack_probabilities<T>(s, probs);
            rescale_rows(acc, rescale);
            if constexpr (X::STOP) {
                const bool all = __all_sync(0xffffffffu, below);
                if (leader) control->votes.warp[i % VOTE_SLOTS][wg * 4 + warp] = all;
            }
        }

        if (!X::STOP || !stopped) {
            await_v();
            wgmma_fence();
            issue_values<X>(acc, probs, v_desc());
            wgmma_wait<0>();
            pin(acc);
        }
        free_v();
        softmax.finish();
        if (X::STOP && stopped) {
            // Before the keys of step i are freed: see the producer.
            if (threadIdx.x == WARPGROUP) control->stop_at(sequence, i + X::STAGES);
            free_k();
            free_q();
        }

        if constexpr (X::GATHER) {
            if (p.tiles_visited != nullptr && threadIdx.x == WARPGROUP) {
                const TileGrid grid(dense);
                p.tiles_visited[(int64_t(w.batch) * dense.num_heads + w.head) * grid.count + w.tile - grid.first] = i;
            }
        }
        T* out = static_cast<T*>(dense.out) + w.batch * dense.out_batch_stride + w.head * dense.out_head_stride;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = w.q_start + row0 + 8 * h;
            store_row<T>(acc, h, 1.f / softmax.row_sum[h], out + row * dense.out_seq_stride, exists[h]);
            if (dense.lse != nullptr && exists[h] && lane % 4 == 0) {
                dense.lse[(int64_t(w.batch) * dense.num_heads + w.head) * dense.q_len + row] =
                    softmax.row_max[h] * dense.softmax_scale + logf(softmax.row_sum[h]);
            }
        }
    }
}

}  // namespace s2o
