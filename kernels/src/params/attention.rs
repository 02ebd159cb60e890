//! Attention: dense, sparse, split over the keys, on lists of blocks, with the options of FlashAttention; pages and probes.

use std::ffi::c_void;
use std::ptr;

use super::{Params, Strides, layout};

/// Parameters of every attention kernel. Queries are the last `q_len` of `k_len` positions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AttnParams {
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub out: *mut c_void,
    pub lse: *mut f32,
    pub next_item: *mut i32,
    pub q_strides: Strides,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub out_strides: Strides,
    pub batch: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub q_len: i32,
    pub k_len: i32,
    pub causal: i32,
    pub heads_per_section: i32,
    pub softmax_scale: f32,
    pub cap_scale: f32,
    pub head_dim: i32,
}

/// Row state that pass 1 leaves for pass 2.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowState {
    pub row_max: f32,
    pub row_sum: f32,
}

/// Heads and segments of a call: `(batch * num_heads + head) * segments + segment`. Null means all.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UnitList {
    pub units: *const i32,
    pub count: *const i32,
}

impl UnitList {
    /// All heads and segments.
    pub const ALL: Self = Self { units: std::ptr::null(), count: std::ptr::null() };
}

/// S2O on the segments `first_segment .. first_segment + num_segments`. Rows from `ranked_rows` on are not touched.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct S2oParams {
    pub attn: AttnParams,
    pub kv_perm: *const i32,
    pub kv_perm_head_stride: i64,
    pub q_perm: *const i32,
    pub state: *mut RowState,
    pub tiles_visited: *mut i32,
    pub out_norm: *mut f32,
    pub units: UnitList,
    pub segment_len: i32,
    pub first_segment: i32,
    pub num_segments: i32,
    pub ranked_rows: i32,
    pub tau: f32,
    pub stop_rule: i32,
    pub literal_frame: i32,
    pub discard: i32,
}

/// Dense attention of rows `first_row .. q_len`, split over the keys.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SplitParams {
    pub attn: AttnParams,
    pub partial_out: *mut f32,
    pub partial_state: *mut RowState,
    pub first_row: i32,
    pub num_splits: i32,
    pub tiles_per_split: i32,
    pub head_dim: i32,
    pub tile_rows: i32,
    pub merge_warps: i32,
    pub group: i32,
}

/// [`SplitParams`] of keys and values in 8 bits (cuda/int8.cuh); `split.attn` has the addresses of the codes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Int8SplitParams {
    pub split: SplitParams,
    pub scales: [*const f32; 2],
    pub scale_batch_stride: i64,
    pub scale_head_stride: i64,
}

/// A window without limit on one side has this size.
pub const NO_LIMIT: i32 = 1 << 30;

/// Exact attention with the options of FlashAttention (cuda/flash_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FlashParams {
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub out: *mut c_void,
    pub next_item: *mut i32,
    pub q_starts: *const i32,
    pub k_starts: *const i32,
    pub pages: *const i32,
    pub ranges: *const i32,
    pub slopes: *const f32,
    pub done: *const i32,
    pub q_strides: Strides,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub out_strides: Strides,
    pub batch: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim: i32,
    pub q_len: i32,
    pub k_len: i32,
    pub q_rows: i32,
    pub k_rows: i32,
    pub page_len: i32,
    pub pages_per_sequence: i32,
    pub num_ranges: i32,
    pub left: i32,
    pub right: i32,
    pub heads_per_section: i32,
    pub softmax_scale: f32,
    pub softcap: f32,
}

/// Sums that `probe_tails` leaves for each head and segment.
pub const PROBE_SUMS: usize = 9;

/// Exact attention of the probes of a call, and the correction of its other rows (cuda/probe_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProbeParams {
    pub split: SplitParams,
    pub q: *const c_void,
    pub out: *mut c_void,
    pub lse: *const f32,
    pub out_norm: *const f32,
    pub prefix_score: *const f32,
    pub positions: *mut i32,
    pub weights: *mut f32,
    pub tail_value: *mut f32,
    pub tail_scale: *mut f32,
    pub sums: *mut f64,
    pub units: UnitList,
    pub unit_list: *mut i32,
    pub unit_count: *mut i32,
    pub next_pass: *mut i32,
    pub repeated: *mut [i32; 2],
    pub tiles_visited: *const i32,
    pub q_strides: Strides,
    pub out_strides: Strides,
    pub max_error: f64,
    pub reach: f64,
    pub num_heads: i32,
    pub group: i32,
    pub q_len: i32,
    pub ranked_rows: i32,
    pub stride: i32,
    pub slots: i32,
    pub segment_len: i32,
    pub first_segment: i32,
    pub segments: i32,
    pub group_first: i32,
    pub group_segments: i32,
    pub pass: i32,
    pub permuted: i32,
}

impl ProbeParams {
    /// For exact attention alone: one segment with `slots` runs of `stride` positions, from position `k_len - rows` on. The
    /// fields of the kernels that choose and correct are null.
    pub fn exact(
        split: SplitParams,
        positions: *mut i32,
        num_heads: i32,
        rows: i32,
        [slots, stride]: [i32; 2],
    ) -> Self {
        Self {
            positions,
            num_heads,
            group: num_heads / split.attn.num_kv_heads,
            q_len: rows,
            ranked_rows: rows,
            stride,
            slots,
            segment_len: split.attn.k_len,
            first_segment: 0,
            segments: 1,
            group_first: 0,
            group_segments: 1,
            q: ptr::null(),
            out: ptr::null_mut(),
            lse: ptr::null(),
            out_norm: ptr::null(),
            prefix_score: ptr::null(),
            weights: ptr::null_mut(),
            tail_value: ptr::null_mut(),
            tail_scale: ptr::null_mut(),
            sums: ptr::null_mut(),
            units: UnitList::ALL,
            unit_list: ptr::null_mut(),
            unit_count: ptr::null_mut(),
            next_pass: ptr::null_mut(),
            repeated: ptr::null_mut(),
            tiles_visited: ptr::null(),
            q_strides: Strides::default(),
            out_strides: Strides::default(),
            max_error: 0.0,
            reach: 0.0,
            pass: 0,
            permuted: 0,
            split,
        }
    }
}

/// Attention on a list of blocks of `TILE_Q` x `TILE_K`, cut at multiples of the absolute position if causal.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockParams {
    pub attn: AttnParams,
    pub key_blocks: *const i32,
    pub block_ranges: *const i64,
}

/// [`BlockParams`] and single keys: list `i` also has the first `column_counts[i]` of its `columns`, which are keys
/// before the query block's first query and in none of its key blocks. Causal.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ColumnParams {
    pub block: BlockParams,
    pub columns: *const i32,
    pub column_counts: *const i32,
    pub column_stride: i64,
}

/// Converts a mask of blocks to the lists of [`BlockParams`]. Key blocks that a query block does not see are left out.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockListParams {
    pub mask: *const u8,
    pub key_blocks: *mut i32,
    pub block_ranges: *mut i64,
    pub num_lists: i32,
    pub query_blocks: i32,
    pub mask_blocks: i32,
    pub first_tile: i32,
    pub causal: i32,
}

/// Converts the chosen keys of each head to the columns of [`ColumnParams`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ColumnListParams {
    pub keys: *const u8,
    pub mask: *const u8,
    pub head_columns: *mut i32,
    pub head_counts: *mut i32,
    pub columns: *mut i32,
    pub column_counts: *mut i32,
    pub column_stride: i64,
    pub k_len: i32,
    pub query_blocks: i32,
    pub mask_blocks: i32,
    pub num_lists: i32,
    pub q_offset: i32,
}

/// Keys and values of one sequence out of pages, side by side (cuda/pages.cu).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PagesParams {
    pub k: *const c_void,
    pub v: *const c_void,
    pub table: *const i32,
    pub k_out: *mut c_void,
    pub v_out: *mut c_void,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub num_pages: i32,
    pub page_len: i32,
    pub num_heads: i32,
    pub head_dim: i32,
    pub len: i32,
}

/// Heads in another size (cuda/resize_heads.cu).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ResizeHeadsParams {
    pub x: *const c_void,
    pub out: *mut c_void,
    pub x_strides: Strides,
    pub rows: i32,
    pub len: i32,
    pub num_heads: i32,
    pub from: i32,
    pub to: i32,
}

layout!(AttnParams: 184, q_strides at 48, batch at 144);
layout!(S2oParams: 280, kv_perm at 184, segment_len at 248);
layout!(SplitParams: 232, partial_out at 184);
layout!(Int8SplitParams: 264, scales at 232);
layout!(FlashParams: 248, batch at 184);
layout!(ProbeParams: 488, q at 232, num_heads at 432);
layout!(BlockParams: 200, key_blocks at 184);
layout!(ColumnParams: 224, columns at 200);
layout!(BlockListParams: 48, num_lists at 24);
layout!(ColumnListParams: 80, k_len at 56);
layout!(PagesParams: 112, k_strides at 40, num_pages at 88);
layout!(ResizeHeadsParams: 64, x_strides at 16, rows at 40);
const _: () = assert!(size_of::<RowState>() == 8);
