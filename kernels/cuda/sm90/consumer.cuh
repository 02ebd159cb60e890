// A consumer warpgroup of engine.cuh: 64 query rows against the item's key tiles.
//
// One step of a warpgroup. The other warpgroup is half a step apart: in its softmax while this warpgroup has the turn.
//
//   turn         |<------------ own ------------>|<------------------ the other's ------------------>|
//   tensor cores    | S(i) = Q K(i)^T | acc += P(i-1) V(i-1) |
//   ALUs                              | mask, row_max        | exp, P(i), vote on tile i, rescale acc |
//   frees                             ^ K(i)                 ^ V(i-1)
//
// A LAGGED stop: the rows vote on tile b in step b and read the votes in step i = b + 2. The stop discards S(i), keeps
// the values of tile i - 1, marks K(i) and frees it unread. The producers see the mark when they wait to load
// K(i + STAGES). Tiles that they have loaded beyond the stop are drained when the next item begins.
//
//   step     |         b            |       b + 1          |           i = b + 2           |
//   issues   | S(b),  P(b-1) V(b-1) | S(b+1),  P(b) V(b)   | S(i),  P(i-1) V(i-1)          |
//   votes    | casts those on b     | casts those on b + 1 | reads those on b: all below   |
//   frees    | K(b), V(b-1)         | K(b+1), V(b)         | V(i-1); marks and frees K(i)  |
//
// An EXACT stop decides at the end of step b: it marks K(b + 1) and discards no scores.
#pragma once

namespace s2o::sm90 {

// S = Q K^T for 64 rows: started, not awaited.
template <class X>
__device__ __forceinline__ void issue_scores(float (&s)[X::KEYS / 2], uint32_t q, uint32_t k) {
    using T = typename X::T;
#pragma unroll
    for (int step = 0; step < X::HEAD_DIM / 16; ++step) {
        const uint32_t dq = descriptor_step((step / 4) * X::Q_PANEL + (step % 4) * 32);
        const uint32_t dk = descriptor_step((step / 4) * X::KV_PANEL + (step % 4) * 32);
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
__device__ __forceinline__ void issue_values(float (&acc)[X::HEAD_DIM / 2], const uint32_t (&p)[X::KEYS / 4],
                                             uint32_t v) {
#pragma unroll
    for (int step = 0; step < X::KEYS / 16; ++step) {
        wgmma_rs<typename X::T>(acc, p + 4 * step, v + descriptor_step(step * 2048));
    }
    wgmma_commit();
}

// The accumulator layout of S is the operand layout of P, so S is only packed in pairs.
template <typename T, int N>
__device__ __forceinline__ void pack_probabilities(const float (&s)[2 * N], uint32_t (&p)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

template <class X>
__device__ __forceinline__ auto modifiers_of(const typename X::Params& p, int head) {
    if constexpr (X::MODIFIES_SCORES) {
        return ScoreModifiers(p, head);
    } else {
        return NoModifiers{};
    }
}

// Softcap and ALiBi on the scores of a tile.
template <class X, class Modifiers>
__device__ __forceinline__ void modify_tile(float (&s)[X::KEYS / 2], const AttnParams& attn, const WorkItem& w,
                                            const Modifiers& modifiers, int first_key, int row0) {
    if constexpr (X::MODIFIES_SCORES) {
        modifiers.apply(s, attn.causal, w.position + row0 - first_key - 2 * int(threadIdx.x % 4));
    }
}

// Frees the tiles that an early stop left in a ring. The position is rebuilt at the end: after a loop that waits, the
// compiler does not know that it is uniform, and would shuffle the descriptors in every step.
template <int STAGES>
__device__ __forceinline__ void drain(RingPosition<STAGES>& pos, uint32_t begin, const uint64_t* full,
                                      const uint64_t* empty, bool leader) {
    begin = uniform(begin);
    while (pos.count != begin) {
        mbarrier_wait(smem_address(&full[pos.stage]), pos.parity);
        __syncwarp();  // a lane that has not seen this phase yet would wait for the phase after the next
        if (leader) mbarrier_arrive(smem_address(&empty[pos.stage]));
        pos.advance();
    }
    pos = RingPosition<STAGES>::at(begin);
}

// One function: moving a phase of the loop to a function or lambda changes the machine code (docs/log.md, item 34).
template <class X>
__device__ __forceinline__ void consume(const SharedLayout<X>& shared, const typename X::Params& p) {
    using T = typename X::T;
    constexpr int ACC = X::HEAD_DIM / 2;
    auto* control = shared.control;
    const AttnParams& attn = attn_of(p);
    const int wg = threadIdx.x / WARPGROUP - 1;
    const int warp = wg * 4 + (threadIdx.x / 32) % 4;
    const int lane = threadIdx.x % 32;
    const bool leader = lane == 0;
    const int row0 = warp * 16 + lane / 4;  // in the tile; the other row is 8 further
    float scale_log2 = attn.softmax_scale * LOG2_E;
    const int my_turn = TURN + wg, other_turn = TURN + 1 - wg;

    RingPosition<X::STAGES> k_pos, v_pos;
    const uint32_t q_desc = uniform(descriptor_k_major(shared.q + wg * 64 * 128));
    auto k_desc = [&] { return uniform(descriptor_k_major(shared.k_tile(k_pos.stage))); };
    auto v_desc = [&] { return uniform(descriptor_n_major(shared.v_tile(v_pos.stage), X::KV_PANEL)); };
    // wgmma reads through the async proxy, cp.async writes through the generic proxy, and PTX requires a proxy fence in
    // between: a MEMBAR in every step of every consumer, 2-3 % of the time (docs/log.md, item 19). Like the cp.async
    // main loops of CUTLASS and FlashAttention-3 we omit it: on this hardware the mbarrier of the copies orders them.
    auto await_k = [&] { mbarrier_wait(smem_address(&control->k_full[k_pos.stage]), k_pos.parity); };
    auto await_v = [&] { mbarrier_wait(smem_address(&control->v_full[v_pos.stage]), v_pos.parity); };
    auto free_k = [&] {
        if (leader) mbarrier_arrive(smem_address(&control->k_empty[k_pos.stage]));
        k_pos.advance();
    };
    auto free_v = [&] {
        if (leader) mbarrier_arrive(smem_address(&control->v_empty[v_pos.stage]));
        v_pos.advance();
    };
    auto free_q = [&] {
        mbarrier_arrive(smem_address(&control->q_empty));  // every thread, because every thread has read the item
    };

    if (wg == 1) named_barrier_arrive(TURN, 2 * WARPGROUP);  // the first turn is the first warpgroup's

    int vote_slot = 0;        // of the last exact decision
    uint32_t first_step = 0;  // of the item, counted across items
    for (int sequence = 0;; ++sequence) {
        mbarrier_wait(smem_address(&control->q_full), sequence & 1);
        if constexpr (X::PERMUTES_QUERIES) fence_proxy_async();
        const int item = control->item[sequence & 1];
        if (item < 0) return;
        WorkItem w;
        X::decode(p, item, w);
        if constexpr (X::STOP != Stop::NEVER) {
            drain(k_pos, control->k_begin[sequence & 1], control->k_full, control->k_empty, leader);
            drain(v_pos, control->v_begin[sequence & 1], control->v_full, control->v_empty, leader);
        }

        const auto modifiers = modifiers_of<X>(p, w.head);
        if constexpr (X::MODIFIES_SCORES) scale_log2 = modifiers.unit * LOG2_E;
        OutputRows rows(w, row0);
        if constexpr (X::SEQUENCES) rows.begin_at(w.sequence.first_row);
        if constexpr (X::SCATTERS_ROWS) {
            __syncwarp();  // the warp has read the positions of the item before
            const int row = row0 - lane / 4 + lane % 16;
            control->positions.of_row[row] = X::position(p, w, row);
            __syncwarp();
        }
        OnlineSoftmax softmax;
        float s[X::KEYS / 2];
        float acc[ACC];
        uint32_t probs[X::KEYS / 4];
        TileEffect tile;
#pragma unroll
        for (int i = 0; i < ACC; ++i) acc[i] = 0.f;
        if constexpr (X::ITEMS_MAY_BE_EMPTY) {
            if (w.steps == 0) {
                free_q();
                store_item<X>(p, w, rows, acc, softmax, scale_log2, false);
                continue;
            }
        }
        if constexpr (X::PERMUTES_QUERIES) resume(p, w, rows, softmax);

        // Step 0: except in a split, the only step that needs mask_tile.
        await_k();
        wgmma_fence();
        issue_scores<X>(s, q_desc, k_desc());
        wgmma_wait<0>();
        pin(s);
        free_k();
        if (w.steps == 1) free_q();
        modify_tile<X>(s, attn, w, modifiers, w.key_tile * X::KEYS, row0);
        if constexpr (!X::PERMUTES_QUERIES) mask_tile(s, attn, w, w.key_tile * X::KEYS, *control, row0);
        if constexpr (X::RAGGED_END) mask_columns(s, w, 0);
        if constexpr (X::PERMUTES_QUERIES) {
            tile.old_sum[0] = softmax.row_sum[0];
            tile.old_sum[1] = softmax.row_sum[1];
        }
        softmax.raise_max<X::ROWS_MAY_BE_EMPTY, X::STOP == Stop::EXACT>(s, scale_log2, tile.rescale, tile.tile_max);
        softmax.exponentiate<X::ROWS_MAY_BE_EMPTY>(s, scale_log2, tile.rescale, tile.tile_sum);
        pack_probabilities<T>(s, probs);
        if constexpr (X::SEQUENCES) {
            // Only the last tile of a sequence has rows of the next, and the last tile is step 0.
            const int keys = w.sequence.k_len - w.key_tile * X::KEYS;
            if (keys < X::KEYS) {
                await_v();
                hide_values<X>(shared.v_tile(v_pos.stage), keys, wg);
            }
        }
        bool stopped = false;
        MeanWeight weights;
        if constexpr (X::STOP == Stop::EXACT && X::PERMUTES_QUERIES) {
            stopped = stops_exactly(p, control->votes.exact, rows, softmax, tile, scale_log2, vote_slot, weights, 1, w.steps);
        }

        [[maybe_unused]] auto decisions = decisions_of<X>(p, w);
        uint32_t v_tile = v_desc();
        int i = 1;
        for (; i < w.steps && !stopped; ++i) {
            // Products, in this warpgroup's turn.
            const uint32_t k_tile = k_desc();
            [[maybe_unused]] uint32_t votes_at;
            if constexpr (X::LAGS) votes_at = control->votes.lagged.address(first_step + i - 2);
            await_k();
            named_barrier_sync(my_turn, 2 * WARPGROUP);
            [[maybe_unused]] Votes votes;
            if constexpr (X::LAGS) votes = LaggedVotes::read(votes_at);
            wgmma_fence();
            issue_scores<X>(s, q_desc, k_tile);
            await_v();
            wgmma_fence();
            issue_values<X>(acc, probs, v_tile);
            named_barrier_arrive(other_turn, 2 * WARPGROUP);
            if constexpr (X::LAGS) {
                // After the products are issued, which hides the latency. A stop discards the scores of step i: half a tile
                // of work for each item that stops, instead of a delay in every step.
                bool stops;
                if constexpr (X::STOP == Stop::LAGGED_WEIGHTS) {
                    stops = decisions.stops(votes.largest());
                } else {
                    stops = i - 1 > w.gather_from && votes.largest() == 0;
                }
                if (stops) {
                    wgmma_wait<0>();
                    pin(s);
                    pin(acc);
                    stopped = true;
                    break;
                }
            }
            // Scores.
            wgmma_wait<1>();
            pin(s);
            free_k();
            if (i == w.steps - 1) free_q();
            modify_tile<X>(s, attn, w, modifiers, (w.key_tile - i) * X::KEYS, row0);
            mask_step(s, attn, w, i, *control, row0);
            // Softmax, around the wait for the values.
            tile.old_sum[0] = softmax.row_sum[0];
            tile.old_sum[1] = softmax.row_sum[1];
            [[maybe_unused]] bool rises = false;
            if constexpr (X::LAGS) {
                rises = softmax.must_rise(s, scale_log2, tile.tile_max);
            } else {
                softmax.raise_max<X::ROWS_MAY_BE_EMPTY, X::STOP == Stop::EXACT>(s, scale_log2, tile.rescale, tile.tile_max);
            }
            // The place of the wait for the values product changes a step by 2 to 8 %; the better place differs with a
            // gather (docs/log.md, items 29 and 30).
            if constexpr (!X::GATHERS_KEYS) {
                softmax.exponentiate<X::ROWS_MAY_BE_EMPTY>(s, scale_log2, tile.rescale, tile.tile_sum);
            }
            wgmma_wait<0>();
            pin(acc);
            free_v();
            v_tile = v_desc();
            if constexpr (X::LAGS) {
                // Keys come in the order of their expected weights, so this is rare after the first tiles.
                if (__any_sync(0xffffffffu, rises)) {
                    softmax.raise_lagging(tile.tile_max, scale_log2, tile.rescale);
                    rescale_rows(acc, tile.rescale);
                    tile.old_sum[0] = softmax.row_sum[0];
                    tile.old_sum[1] = softmax.row_sum[1];
                }
                tile.rescale[0] = tile.rescale[1] = 1.f;
            }
            if constexpr (X::GATHERS_KEYS) {
                for (float& row_max : softmax.row_max) row_max = behind(row_max, acc[0]);
                softmax.exponentiate<X::ROWS_MAY_BE_EMPTY>(s, scale_log2, tile.rescale, tile.tile_sum);
            }
            // Vote, and rescale the accumulator to the new maximum.
            [[maybe_unused]] uint32_t vote;
            if constexpr (X::LAGS) vote = lagged_vote<X::STOP>(rows, softmax, tile, scale_log2, p.tau);
            pack_probabilities<T>(s, probs);
            if constexpr (!X::LAGS) rescale_rows(acc, tile.rescale);
            if constexpr (X::LAGS) {
                if (leader) control->votes.lagged.cast(first_step + i, warp, vote);
            }
            if constexpr (X::STOP == Stop::EXACT) {
                stopped = i >= w.gather_from &&
                          stops_exactly(p, control->votes.exact, rows, softmax, tile, scale_log2, vote_slot, weights,
                                        i - w.gather_from + 1, w.steps - w.gather_from);
            }
        }

        if constexpr (X::STOP != Stop::NEVER) {
            // First, because the loads of the next item wait for it.
            if (stopped && i < w.steps) {
                if constexpr (X::STOP == Stop::EXACT) await_k();
                // Mark the keys of step i before they are freed unread: see the producer.
                if (threadIdx.x == WARPGROUP) control->stopped[k_pos.stage] = sequence;
                free_k();
                free_q();
            }
        }

        // The values of the last tile, unless they are already added or discarded.
        first_step += w.steps;
        bool values_left = true;
        if constexpr (X::LAGS) values_left = !stopped;
        if constexpr (X::STOP == Stop::EXACT) {
            values_left = !(stopped && p.discard);
            if (!values_left) {
                await_v();
                __syncwarp();  // as in drain
            }
        }
        if (values_left) {
            await_v();
            wgmma_fence();
            issue_values<X>(acc, probs, v_desc());
            wgmma_wait<0>();
            pin(acc);
        }
        free_v();
        if constexpr (X::IS_HALVED) {
            // Read again, because registers are full in the loop. The producer replaces it after the next item.
            X::decode(p, control->item[sequence & 1], w);
            rows = OutputRows(w, row0);
            if constexpr (X::SEQUENCES) rows.begin_at(w.sequence.first_row);
        }
        softmax.finish();
        if constexpr (X::MAY_STOP) {
            if (p.tiles_visited != nullptr && threadIdx.x == WARPGROUP) {
                p.tiles_visited[w.slot] = i;
            }
            stopped = stopped && (i < w.steps || p.discard);
        }
        store_item<X>(p, w, rows, acc, softmax, scale_log2, stopped);
    }
}

}  // namespace s2o::sm90
