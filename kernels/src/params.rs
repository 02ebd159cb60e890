//! Parameters of the kernels, mirrored field by field from the structs of the same names in `cuda/*.cuh` and
//! `cuda/*.cu`, which document shapes and units. Both sides assert the layouts. Strides are in elements, pointers are
//! device addresses.
#![expect(missing_docs, reason = "the fields are documented where the kernels read them")]

use std::ffi::c_void;

/// Types that a kernel may take by value.
///
/// # Safety
/// The type is `repr(C)`, plain data, and has the layout of the kernels' struct of the same name.
pub unsafe trait Params: Copy {}

/// Strides of a tensor whose innermost dimension is contiguous.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strides {
    pub batch: i64,
    pub seq: i64,
    pub head: i64,
}

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
    pub last_gain: *mut f32,
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
    pub unless_whole: i32,
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
    pub last_gain: *const f32,
    pub out_norm: *const f32,
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

/// Algorithm 1 on the segments `first_segment .. first_segment + num_segments` of the `num_heads` heads at the pointers
/// (cuda/ranking_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RankingParams {
    pub q: *const c_void,
    pub k: *const c_void,
    pub kv_perm: *mut i32,
    pub coefficients: *mut u16,
    pub partial_moments: *mut f32,
    pub arrivals: *mut u32,
    pub scores: *mut u16,
    pub score_ranges: *mut f32,
    pub q_perm: *mut i32,
    pub key_guide: *mut f32,
    pub q_strides: Strides,
    pub k_strides: Strides,
    pub kv_perm_head_stride: i64,
    pub coefficient_batch_stride: i64,
    pub coefficient_head_stride: i64,
    pub batch: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub q_len: i32,
    pub k_len: i32,
    pub segment_len: i32,
    pub first_segment: i32,
    pub num_segments: i32,
    pub coefficient_segment: i32,
    pub front_sink: i32,
    pub recent: i32,
    pub ranked_rows: i32,
    pub sort_buckets: i32,
    pub sort_window: i32,
    pub softmax_scale: f32,
    pub second_cumulant: f32,
}

/// RMS norm of the rows of `x`, after `delta` is added if it is not null (cuda/decoder_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NormParams {
    pub x: *const c_void,
    pub delta: *const c_void,
    pub weight: *const c_void,
    pub sum: *mut c_void,
    pub out: *mut c_void,
    pub scales: *mut f32,
    pub width: i32,
    pub eps: f32,
}

/// `silu(gate) * up`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SiluParams {
    pub gate_up: *const c_void,
    pub out: *mut c_void,
    pub scales: *mut f32,
    pub width: i64,
}

/// Rows as e4m3 with a scale each.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QuantiseParams {
    pub x: *const c_void,
    pub out: *mut c_void,
    pub scales: *mut f32,
    pub width: i64,
}

/// The product of a few rows with an e4m3 matrix.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FewRowsParams {
    pub x: *const c_void,
    pub weight: *const c_void,
    pub scales: *const f32,
    pub out: *mut c_void,
    pub rows: i32,
    pub width_in: i32,
    pub width_out: i32,
}

/// Normalises (optionally) and rotates queries and keys, and writes keys and values to the cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RotateParams {
    pub qkv: *const c_void,
    pub q_norm: *const c_void,
    pub k_norm: *const c_void,
    pub table: *const f32,
    pub q_out: *mut c_void,
    pub k_out: *mut c_void,
    pub v_out: *mut c_void,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub len: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub eps: f32,
}

/// Rows of keys or values in 16 bits and in 8 (cuda/int8.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Int8Params {
    pub rows: *mut c_void,
    pub codes: *mut u8,
    pub scales: *mut f32,
    pub row_strides: Strides,
    pub code_strides: Strides,
    pub scale_strides: Strides,
    pub len: i32,
    pub num_heads: i32,
}

/// cos and sin of consecutive positions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RotationParams {
    pub inverse_frequencies: *const f32,
    pub table: *mut f32,
    pub factor: f64,
    pub start: i64,
    pub len: i32,
    pub half: i32,
}

/// Means of blocks of tokens (cuda/selection_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockPoolParams {
    pub x: *const c_void,
    pub centre: *const f32,
    pub means: *mut f32,
    pub self_similarity: *mut f32,
    pub strides: Strides,
    pub offset: i64,
    pub len: i64,
    pub block: i64,
    pub heads: i32,
    pub blocks: i32,
}

/// Row `r` reads entry `r / each % count` of an operand that rows share.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowIndex {
    pub each: i32,
    pub count: i32,
}

/// Top-p, top-k or softmax of rows of scores.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RowParams {
    pub scores: *const f32,
    pub mask: *mut u8,
    pub weights: *mut f32,
    pub left_out: *const f32,
    pub counts: *const f32,
    pub bounds: *const u32,
    pub scored: *const u8,
    pub forced: *const u8,
    pub select_all: *const u8,
    pub enabled: *const u8,
    pub thresholds: *mut c_void,
    pub left_out_of: RowIndex,
    pub bounds_of: RowIndex,
    pub scored_of: RowIndex,
    pub forced_of: RowIndex,
    pub select_all_of: RowIndex,
    pub enabled_of: RowIndex,
    pub row_len: i32,
    pub rows: i32,
    pub first_row: i32,
    pub softmax: i32,
    pub scale: f32,
    pub forced_count_first: i32,
    pub merged_columns: i32,
    pub pass: i32,
}

/// Bytes of the search state for the threshold of a long row. The state must be zero before the first launch.
pub const ROW_THRESHOLD_BYTES: usize = 18464;

/// Attention of the last queries, by key and by distance.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LastQueryParams {
    pub q: *const c_void,
    pub k: *const c_void,
    pub states: *mut RowState,
    pub by_key: *mut f32,
    pub by_distance: *mut f32,
    pub q_strides: Strides,
    pub k_strides: Strides,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub rows: i32,
    pub k_len: i32,
    pub tiles_per_chunk: i32,
    pub state_chunks: i32,
    pub softmax_scale: f32,
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

/// Keys and values in another order, followed by all of them in their own order.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ReorderParams {
    pub k: *const c_void,
    pub v: *const c_void,
    pub positions: *const u32,
    pub k_out: *mut c_void,
    pub v_out: *mut c_void,
    pub k_strides: Strides,
    pub v_strides: Strides,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub before: i32,
    pub k_len: i32,
    pub head_dim: i32,
}

/// The tokens of a sequence by head, with zeros before and after them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StridesParams {
    pub x: *const c_void,
    pub out: *mut c_void,
    pub seq_stride: i64,
    pub head_stride: i64,
    pub num_heads: i32,
    pub len: i32,
    pub slots: i32,
    pub before: i32,
    pub stride: i32,
    pub head_dim: i32,
}

/// Softmaxes over key strides, summed by blocks of query and key strides.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StrideSharesParams {
    pub products: *const c_void,
    pub limits: *const u32,
    pub out: *mut f32,
    pub rows: i32,
    pub columns: i32,
    pub per_block: i32,
    pub key_blocks: i32,
    pub scale: f32,
}

macro_rules! layout {
    ($type:ident: $size:literal $(, $field:ident at $offset:literal)*) => {
        const _: () = assert!(size_of::<$type>() == $size $(&& std::mem::offset_of!($type, $field) == $offset)*);
        // SAFETY: repr(C), integers, floats and addresses only; the headers in cuda/ assert the same size and offsets.
        unsafe impl Params for $type {}
    };
}

layout!(AttnParams: 176, q_strides at 48, batch at 144);
layout!(S2oParams: 280, kv_perm at 176, segment_len at 248);
layout!(SplitParams: 216, partial_out at 176);
layout!(Int8SplitParams: 248, scales at 216);
layout!(FlashParams: 248, batch at 176);
layout!(ProbeParams: 472, q at 216, num_heads at 416);
layout!(BlockParams: 192, key_blocks at 176);
layout!(ColumnParams: 216, columns at 192);
layout!(BlockListParams: 48, num_lists at 24);
layout!(ColumnListParams: 80, k_len at 56);
layout!(RankingParams: 216, batch at 152);
layout!(NormParams: 56, width at 48);
layout!(SiluParams: 32, width at 24);
layout!(QuantiseParams: 32, width at 24);
layout!(FewRowsParams: 48, rows at 32);
layout!(RotateParams: 120, k_strides at 56, len at 104);
layout!(Int8Params: 104, row_strides at 24, len at 96);
layout!(RotationParams: 40, len at 32);
layout!(BlockPoolParams: 88, strides at 32, heads at 80);
layout!(RowParams: 168, left_out_of at 88, row_len at 136);
layout!(LastQueryParams: 120, q_strides at 40, num_heads at 88);
layout!(PagesParams: 112, k_strides at 40, num_pages at 88);
layout!(ReorderParams: 112, k_strides at 40, num_heads at 88);
layout!(StridesParams: 56, num_heads at 32);
layout!(StrideSharesParams: 48, rows at 24);
const _: () = assert!(size_of::<RowState>() == 8);
