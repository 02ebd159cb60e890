// The attention engine for sm_80 and newer: one persistent kernel for dense, block, split and S2O attention.
//
// Four warps, 32 query rows each; two blocks share an SM, and one multiplies while the other is in its softmax. With
// head_dim 256 a block has eight warps of 16 rows, and an SM one block. Keys and values come in half tiles of 64
// (loader.cuh); queries stay in shared memory. A step of the schedule is two visits of a half tile: S = Q K^T,
// P = exp(S - row_max), acc += P V. The stop decision covers all 128 keys of a step.
#pragma once
#include "../launch.cuh"
#include "loader.cuh"
#include "store.cuh"
#include "stop_vote.cuh"

namespace s2o::sm80 {

// The warp's queries as operands: kept in registers if these suffice, otherwise read again for each half tile.
template <class X>
struct Queries {
    static constexpr int M = X::FRAGMENTS, STEPS = X::HEAD_DIM / 16;
    static constexpr bool KEPT = X::HEAD_DIM == 64 && !X::OVERLAPS;
    uint32_t address;
    uint32_t kept[KEPT ? STEPS : 1][M][4];

    __device__ __forceinline__ void read(uint32_t (&a)[M][4], int step) const {
#pragma unroll
        for (int m = 0; m < M; ++m) ldmatrix(a[m], column_step(address, step) + m * 16 * X::ROW);
    }
    __device__ __forceinline__ void keep() {
        if constexpr (KEPT) {
#pragma unroll
            for (int d = 0; d < STEPS; ++d) read(kept[d], d);
        }
    }
    __device__ __forceinline__ void operand(uint32_t (&a)[M][4], int step) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < 4 * M; ++i) a[i / 4][i % 4] = kept[step][i / 4][i % 4];
        } else {
            read(a, step);
        }
    }
};

template <class X>
__device__ __forceinline__ void cap(float (&s)[X::FRAGMENTS][HALF_K / 2], float cap_scale) {
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
        for (int i = 0; i < HALF_K / 2; ++i) s[m][i] = tanh_approx(s[m][i] * cap_scale);
    }
}

template <class X>
__device__ __forceinline__ void load_queries(const typename X::Params& p, const WorkItem& w, char* q) {
    const AttnParams& attn = attn_of(p);
    const char* head =
        static_cast<const char*>(attn.q) + 2 * (w.batch * attn.q_strides.batch + w.head * attn.q_strides.head);
    for_each_chunk<X>(q, [&](int r, char* chunk, int column) {
        const int row = row_of<X>(p, w, r);
        cp_async_16(smem_address(chunk), head + 2 * (max(row, 0) * attn.q_strides.seq + column), row >= 0);
    });
}

// The keys of a half tile that the rows of a warp see.
struct Visibility {
    int last_existing, last_causal;  // last_causal: for the row that sees the fewest keys, or fewer
    int more_causal;                 // keys that the others see beyond it at most
    __device__ __forceinline__ bool all() const { return min(last_existing, last_causal) >= HALF_K - 1; }
    __device__ __forceinline__ bool none() const { return min(last_existing, last_causal + more_causal) < 0; }

    // `beyond` is the number of keys that a row sees beyond last_causal.
    template <int FRAGMENTS, class F>
    __device__ __forceinline__ void mask(float (&s)[FRAGMENTS][HALF_K / 2], int lane, F beyond) const {
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {
#pragma unroll
            for (int i = 0; i < HALF_K / 2; ++i) {
                const int row = m * 16 + 8 * (i >> 1 & 1) + lane / 4;
                const int key = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
                if (key > min(last_existing, last_causal + beyond(row))) s[m][i] = -INFINITY;
            }
        }
    }
};

// P for a tile that may stop, and the maxima of the half tile.
template <class X>
__device__ __forceinline__ void probabilities(OnlineSoftmax (&softmax)[X::FRAGMENTS],
                                              float (&s)[X::FRAGMENTS][HALF_K / 2], float scale_log2,
                                              uint32_t (&probs)[X::FRAGMENTS][HALF_K / 4], float (&rescale)[X::FRAGMENTS][2],
                                              float (&half_max)[X::FRAGMENTS][2]) {
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
        float tile_sum[2];
        softmax[m].template update<X::ROWS_MAY_BE_EMPTY, true>(s[m], scale_log2, rescale[m], tile_sum, half_max[m]);
#pragma unroll
        for (int i = 0; i < HALF_K / 4; ++i) probs[m][i] = pack<typename X::T>(s[m][2 * i], s[m][2 * i + 1]);
    }
}

// Late in a row no maximum rises, and the rescale is skipped.
template <class X>
__device__ __forceinline__ void rescale_if_needed(float (&acc)[X::FRAGMENTS][X::HEAD_DIM / 2],
                                                  const float (&rescale)[X::FRAGMENTS][2]) {
    bool rises = false;
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) rises = rises || rescale[m][0] != 1.f || rescale[m][1] != 1.f;
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
        for (int m = 0; m < X::FRAGMENTS; ++m) rescale_rows(acc[m], rescale[m]);
    }
}

// Processes one item. DISCARD drops the tile that triggers the stop, so the decision comes before its values. Registers
// cannot hold the scores of the first half, so its keys are scored twice. The visits of a gathered step, each with the
// half tiles that it takes from the ring:
//
//   keep      | K0: scores; V0: add | K1: scores; V1: add, vote | next step, K0: count the votes
//   DISCARD   | K0: scores | K1: scores, vote; V1: count the votes, add | K0: scores; V0: add |
//
// One function: moving more of the loop out of it changes the machine code (docs/log.md, item 34).
template <class X, bool DISCARD>
__device__ __forceinline__ void attend(const SharedLayout<X>& shared, const typename X::Params& p) {
    const AttnParams& attn = attn_of(p);
    Control<X>& control = shared.control();
    const WorkItem& w = control.work;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp * X::WARP_ROWS;
    float scale_log2 = attn.softmax_scale * LOG2_E;
    if constexpr (X::MODIFIES_SCORES) scale_log2 = control.modifiers.unit * LOG2_E;

    Loader<X, DISCARD> loader(shared, p);
    load_queries<X>(p, w, shared.q());
    loader.start();

    OnlineSoftmax softmax[X::FRAGMENTS];
    float acc[X::FRAGMENTS][X::HEAD_DIM / 2];
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
        for (int i = 0; i < X::HEAD_DIM / 2; ++i) acc[m][i] = 0.f;
    }
    [[maybe_unused]] OwnRow own = {-INFINITY, 0.f};
    if constexpr (X::OUTPUT == Output::RESUMED) {
        const int row = row_of<X>(p, w, own_row_index<X>());
        const RowState before = row < 0 ? RowState{0.f, 1.f} : p.state[int64_t(w.batch_head(attn)) * attn.q_len + row];
        own = {before.row_max, before.row_sum};
        float row_max[X::FRAGMENTS][2];
        to_quad(own.row_max, row_max);
#pragma unroll
        for (int m = 0; m < X::FRAGMENTS; ++m) {
            softmax[m].row_max[0] = row_max[m][0];
            softmax[m].row_max[1] = row_max[m][1];
        }
    }

    Queries<X> queries;
    queries.address = smem_address(shared.q()) + warp_row * X::ROW + rows_first<X::ROW>(lane);
    cp_async_wait<X::RING_SLOTS - 2>();  // queries arrive with the first keys; a warp loads its own
    __syncwarp();
    queries.keep();

    int step = 0;
    bool stop = false;
    [[maybe_unused]] MeanWeight weights;
    for (; step < w.steps; ++step) {
        const bool gathered = X::GATHERS_KEYS && step >= w.gather_from;
        const bool twice = DISCARD && gathered;
#pragma unroll X::VISITS_UNROLLED
        for (int visit = 0; visit < (twice ? 3 : 2); ++visit) {
            // Keys that a row of the warp sees beyond last_causal.
            auto beyond = [&](int row) {
                if constexpr (X::SCATTERS_ROWS) {
                    return X::position(p, w, warp_row + row) - w.position;
                } else {
                    return row;
                }
            };
            Visibility visibility{HALF_K, HALF_K, 0};
            if (!gathered) {
                const int first_key = key_tile<X>(w, step) * TILE_K + visit * HALF_K;
                visibility.last_existing = attn.k_len - 1 - first_key;
                if constexpr (X::SCATTERS_ROWS) {
                    visibility.last_causal = w.position - first_key;
                    visibility.more_causal = w.last_position - w.position;
                } else if (attn.causal) {
                    visibility.last_causal = X::position(p, w, warp_row) - first_key;
                    visibility.more_causal = X::WARP_ROWS - 1;
                }
            } else if (X::RAGGED_END && step == w.steps - 1) {
                visibility.last_existing = w.last_keys - 1 - visit * HALF_K;
            }
            const bool visible = !visibility.none();
            // All of the above comes before the barrier in `next`, so that the products begin right after it.
            const uint32_t k_offset = columns_first<X::ROW>(thread_index<X>() % 32);
            const uint32_t k = loader.next() + k_offset;
            if constexpr (X::MAY_STOP && !DISCARD) {
                const int judged = step - w.gather_from;
                stop = visit == 0 && judged > 0 && stops(p, control.votes, weights, judged, w.steps - w.gather_from);
                if (stop) break;
            }
            [[maybe_unused]] float kept[X::FRAGMENTS][HALF_K / 2];  // scores
            uint32_t probs[X::FRAGMENTS][HALF_K / 4];
            float rescale[X::FRAGMENTS][2];
            if (!visible) loader.refill();
            if (visible) {
                float dropped[X::FRAGMENTS][HALF_K / 2];
                auto& s = X::OVERLAPS ? kept : dropped;
                multiply_keys<typename X::T, X::HEAD_DIM, X::ROW, HALF_K>(
                    s, k, [&](int d, uint32_t (&a)[X::FRAGMENTS][4]) { queries.operand(a, d); });
                if constexpr (X::MODIFIES_SCORES) {
                    static_assert(!X::GATHERS_KEYS && !X::SCATTERS_ROWS && !X::CAPS_SCORES, "distances of rows and keys");
                    const int row = X::position(p, w, warp_row + lane / 4);
                    const int apart = row - key_tile<X>(w, step) * TILE_K - visit * HALF_K - 2 * (lane % 4);
#pragma unroll
                    for (int m = 0; m < X::FRAGMENTS; ++m) control.modifiers.apply(s[m], attn.causal, apart + m * 16);
                }
                if constexpr (X::CAPS_SCORES) cap<X>(s, attn.cap_scale);
                // The lane is read again: the compiler would keep the numbers of its keys in registers during all visits.
                if (!visibility.all()) visibility.mask(s, X::MAY_STOP ? lane : s2o::thread_index() % 32, beyond);
                if constexpr (X::MAY_STOP) {
                    float half_max[X::FRAGMENTS][2];
                    probabilities<X>(softmax, s, scale_log2, probs, rescale, half_max);
                    const float largest = own_row(half_max);
                    float& tile_max = control.tile_max[thread_index()];
                    tile_max = visit == 0 ? largest : fmaxf(tile_max, largest);
                } else {
                    // The stop rules of pass 2 compare with the true maxima that pass 1 leaves.
                    constexpr bool LAGS = X::OUTPUT != Output::STATEFUL;
                    raise_maxima<X::ROWS_MAY_BE_EMPTY, LAGS>(
                        softmax, s, scale_log2, [&](int m, const float (&factors)[2]) { rescale_rows(acc[m], factors); });
                    loader.refill();
                    if constexpr (!X::OVERLAPS) {
#pragma unroll
                        for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
                            for (int k = 0; k < HALF_K / 16; ++k) {
                                softmax[m].template add<typename X::T, X::ROWS_MAY_BE_EMPTY>(s[m] + 8 * k, scale_log2,
                                                                                             probs[m] + 4 * k);
                            }
                        }
                    }
                }
            }
            if constexpr (DISCARD) {
                if (twice && visit == 0) continue;
                if (twice && visit == 1) {
                    cast_vote(p, w, own, own.preview(softmax, scale_log2), control, scale_log2);
                }
            }
            const uint32_t v_offset = rows_first<X::ROW>(thread_index<X>() % 32);
            const uint32_t v = (X::JOINS_VALUES ? k - k_offset + X::HALF_BYTES : loader.next()) + v_offset;
            if constexpr (DISCARD) {
                if (twice && visit == 1) {
                    stop = stops(p, control.votes, weights, step - w.gather_from + 1, w.steps - w.gather_from);
                    const RowUpdate update = own.preview(softmax, scale_log2);
                    if (stop) break;
                    to_quad(update.rescale, rescale);
                    own.add(update);
                }
            }
            if (visible) {
                if constexpr (X::MAY_STOP) rescale_if_needed<X>(acc, rescale);
                if constexpr (X::OVERLAPS) {
                    add_values<typename X::T, X::ROW, HALF_K, true>(acc, v, [&](int m, int k, int i) {
                        return softmax[m].template add<typename X::T, X::ROWS_MAY_BE_EMPTY>(kept[m] + 8 * k, i, scale_log2);
                    });
                } else {
                    add_values<typename X::T, X::ROW, HALF_K>(acc, v,
                                                              [&](int m, int k, int i) { return probs[m][4 * k + i]; });
                }
            }
            loader.refill();
            if constexpr (X::MAY_STOP) {
                if (visit == 0) continue;
                if (!twice) {
                    const RowUpdate update = own.preview(softmax, scale_log2);
                    if (gathered && !DISCARD) cast_vote(p, w, own, update, control, scale_log2);
                    own.add(update);
                }
#pragma unroll
                for (int m = 0; m < X::FRAGMENTS; ++m) softmax[m].row_sum[0] = softmax[m].row_sum[1] = 0.f;
            }
        }
        if (stop) {
            step += DISCARD;  // dropped, but visited
            break;
        }
    }
    // Loads may still be in flight: after an early stop, or those of the queries if there is no step.
    cp_async_wait<0>();

    float row_max[X::FRAGMENTS][2], row_sum[X::FRAGMENTS][2];
    if constexpr (X::MAY_STOP) {
        to_quad(own.row_max, row_max);
        to_quad(own.row_sum, row_sum);
    } else {
#pragma unroll
        for (int m = 0; m < X::FRAGMENTS; ++m) {
            softmax[m].finish();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_max[m][h] = softmax[m].row_max[h];
                row_sum[m][h] = softmax[m].row_sum[h];
            }
        }
    }
    if constexpr (X::OUTPUT == Output::PARTIAL) {
        store_partial<X>(p, w, acc, row_max, row_sum);
    } else {
        store_rows<X>(p, w, shared.q(), acc, row_max, row_sum, scale_log2, stop);
    }
    if constexpr (X::MAY_STOP) {
        if (p.tiles_visited != nullptr && threadIdx.x == 0) p.tiles_visited[w.slot] = step;
    }
}

// Finds the next item that exists. A block's first item is its index; the others come from the counter, fetched one
// ahead. Not inlined, because the values that its divisions precompute would spill.
template <class X>
__device__ __noinline__ void take_item(const typename X::Params& p, Control<X>& control) {
    const AttnParams& attn = attn_of(p);
    const WorkItem& w = control.work;
    const Strides &k = attn.k_strides, &v = attn.v_strides;
    const int num_items = X::num_items(p);
    auto advance = [&] { control.item = gridDim.x + atomicAdd(attn.next_item, 1); };
    while (control.item < num_items && !X::decode(p, control.item, control.work)) advance();
    control.end = control.item >= num_items;
    if (control.end) return;
    control.heads.of[0] = static_cast<const char*>(attn.k) + 2 * (w.batch * k.batch + w.kv_head * k.head);
    control.heads.of[1] = static_cast<const char*>(attn.v) + 2 * (w.batch * v.batch + w.kv_head * v.head);
    if constexpr (X::MODIFIES_SCORES) control.modifiers = ScoreModifiers(p, w.head);
    advance();
}

// The body of every kernel; instantiate.cuh names the kernels.
template <class X>
__device__ __forceinline__ void attention(const typename X::Params& p) {
    extern __shared__ __align__(1024) char raw[];
    const SharedLayout<X> shared{raw};
    Control<X>& control = shared.control();
    if (threadIdx.x == 0) control.item = blockIdx.x;
    for (;;) {
        if (threadIdx.x == 0) take_item<X>(p, control);
        __syncthreads();
        if (control.end) return;
        if constexpr (X::MAY_STOP) {
            if (p.discard) {
                attend<X, true>(shared, p);
            } else {
                attend<X, false>(shared, p);
            }
        } else {
            attend<X, false>(shared, p);
        }
        __syncthreads();
    }
}

}  // namespace s2o::sm80
