// Hides the keys of a tile that its rows must not see, and the values of another sequence.
#pragma once

namespace s2o::sm90 {

// Hides the keys of a tile that lie beyond the limits of this thread's two rows, counted from its first column.
template <int N>
__device__ __forceinline__ void hide_beyond(float (&s)[N], int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (8 * (i >> 2) + (i & 1) > ((i & 2) ? limit1 : limit0)) s[i] = -INFINITY;
    }
}

// Position of row `row` of the item's tile.
template <class X>
__device__ __forceinline__ int position_of(const WorkItem& w, const ControlBlock<X>& control, int row) {
    if constexpr (X::SCATTERS_ROWS) return control.positions.of_row[row];
    return w.position + row;
}

// Hides the keys of a tile that its rows must not see.
template <class X>
__device__ __forceinline__ void mask_tile(float (&s)[X::KEYS / 2], const AttnParams& attn, const WorkItem& w,
                                          int first_key, const ControlBlock<X>& control, int row0) {
    const int column = first_key + 2 * (threadIdx.x % 4);
    const int last = X::num_keys(attn, w) - 1;
    const int limit0 = (attn.causal ? min(position_of<X>(w, control, row0), last) : last) - column;
    const int limit1 = (attn.causal ? min(position_of<X>(w, control, row0 + 8), last) : last) - column;
    hide_beyond(s, limit0, limit1);
}

// Zeroes the values of a tile from row `rows` on, which belong to the next sequence: their weights are zero, but they
// need not be numbers. Both consumers write the same zeros, so that neither waits for the other.
template <class X>
__device__ __forceinline__ void hide_values(uint32_t v_tile, int rows, int wg) {
    for (int i = rows * 8 + threadIdx.x % WARPGROUP; i < X::KEYS * 8; i += WARPGROUP) {
#pragma unroll
        for (int panel = 0; panel < X::PANELS; ++panel) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v_tile + panel * X::KV_PANEL + 16 * i), "r"(0)
                         : "memory");
        }
    }
    fence_proxy_async();
    named_barrier_sync(HIDDEN_VALUES + wg, WARPGROUP);
}

// Hides the end of a ragged gathered tile.
template <int N>
__device__ __forceinline__ void mask_columns(float (&s)[N], const WorkItem& w, int step) {
    if (step < w.gather_from || step != w.steps - 1) return;
    const int limit = w.last_keys - 1 - 2 * (threadIdx.x % 4);
    hide_beyond(s, limit, limit);
}

// The masks of step i > 0.
template <class X>
__device__ __forceinline__ void mask_step(float (&s)[X::KEYS / 2], const AttnParams& attn, const WorkItem& w, int i,
                                          const ControlBlock<X>& control, int row0) {
    if constexpr (X::ROWS_MAY_BE_EMPTY) {
        const int first_key = X::key_tile(w, i) * X::KEYS, k_len = X::num_keys(attn, w);
        if (first_key + X::KEYS > min(attn.causal ? w.position + 1 : k_len, k_len)) {
            mask_tile(s, attn, w, first_key, control, row0);
        }
    }
    if constexpr (X::RAGGED_END) mask_columns(s, w, i);
}

}  // namespace s2o::sm90
