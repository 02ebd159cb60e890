//! Parameters of the kernels, mirrored from `cuda/params.cuh`: both sides assert the layouts. Strides are in elements,
//! pointers are addresses on the device.

use std::ffi::c_void;

/// Types that a kernel may take by value.
///
/// # Safety
/// `repr(C)`, plain data, and of the layout that the kernels know under this name.
pub unsafe trait Params: Copy {}

/// Strides of a tensor whose innermost dimension is contiguous.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strides {
    /// From sequence to sequence of the batch.
    pub batch: i64,
    /// From position to position.
    pub seq: i64,
    /// From head to head.
    pub head: i64,
}

/// What every attention kernel needs. Queries are the last `q_len` of `k_len` positions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AttnParams {
    /// (batch, q_len, num_heads, head_dim)
    pub q: *const c_void,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: *const c_void,
    /// As `k`.
    pub v: *const c_void,
    /// As `q`.
    pub out: *mut c_void,
    /// (batch, num_heads, q_len): natural log of the softmax mass of the visited keys; or null.
    pub lse: *mut f32,
    /// One counter, zero at launch.
    pub next_item: *mut i32,
    /// Of `q`.
    pub q_strides: Strides,
    /// Of `k`.
    pub k_strides: Strides,
    /// Of `v`.
    pub v_strides: Strides,
    /// Of `out`.
    pub out_strides: Strides,
    /// Sequences.
    pub batch: i32,
    /// Query heads.
    pub num_heads: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Queries.
    pub q_len: i32,
    /// Keys.
    pub k_len: i32,
    /// 1 if a query sees the keys up to its own position, 0 if all.
    pub causal: i32,
    /// Heads walked together, so that their keys and values stay in L2.
    pub heads_per_section: i32,
    /// Factor on `q . k` before the softmax.
    pub softmax_scale: f32,
}

/// Row state that pass 1 hands to pass 2.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowState {
    /// Of the unscaled scores.
    pub row_max: f32,
    /// Softmax mass relative to it.
    pub row_sum: f32,
}

/// S2O on the segments `first_segment .. first_segment + num_segments`; rows from `ranked_rows` on are left alone.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SparseParams {
    /// With `causal` 1.
    pub attn: AttnParams,
    /// Per (batch, head): the orders of the segments one after the other, segment `n` has `n * segment_len` keys.
    pub kv_perm: *const i32,
    /// From head to head of `kv_perm`.
    pub kv_perm_head_stride: i64,
    /// (batch, num_heads, q_len): slot `r` of a segment's row range names the row that comes there.
    pub q_perm: *const i32,
    /// (batch, num_heads, q_len): written by pass 1, read by pass 2.
    pub state: *mut RowState,
    /// (batch, num_heads, segments of the call, segment_len / TILE_Q), by pass 2 without the window's; or null.
    pub tiles_visited: *mut i32,
    /// Tokens in a segment.
    pub segment_len: i32,
    /// First segment of the launch, on absolute positions.
    pub first_segment: i32,
    /// Segments of the launch.
    pub num_segments: i32,
    /// Rows of the call before the dense tail.
    pub ranked_rows: i32,
    /// 0 never stops.
    pub tau: f32,
    /// 0 all rows, 1 mean ratio, 2 sum ratio.
    pub stop_rule: i32,
    /// 1: gains across maxima, Algorithm 3 to the letter.
    pub literal_frame: i32,
    /// 1: the triggering tile is dropped.
    pub discard: i32,
}

/// Dense attention of rows `first_row .. q_len`, split over the keys.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SplitParams {
    /// The whole call.
    pub attn: AttnParams,
    /// (batch, num_heads, row tiles, num_splits, TILE_Q, head_dim), not normalised.
    pub partial_out: *mut f32,
    /// (batch, num_heads, row tiles, num_splits, TILE_Q)
    pub partial_state: *mut RowState,
    /// Where the row tiles begin.
    pub first_row: i32,
    /// Parts that the keys are cut into.
    pub num_splits: i32,
    /// Key tiles in a part.
    pub tiles_per_split: i32,
    /// Size of a head.
    pub head_dim: i32,
}

/// Attention on a list of blocks of `TILE_Q` x `TILE_K`, cut at multiples of the absolute position when causal.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockParams {
    /// The whole call.
    pub attn: AttnParams,
    /// Of a query block, in descending order; causal: none above the diagonal.
    pub key_blocks: *const i32,
    /// (batch * num_heads * query blocks, 2): where a query block's list begins and ends.
    pub block_ranges: *const i64,
}

/// [`BlockParams`] and single keys beside them: for each list as many of `columns` as `column_counts` says, keys before
/// the query block's first query, in none of its key blocks. Causal.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ColumnParams {
    /// The blocks.
    pub block: BlockParams,
    /// (lists, column_stride), from each count on to the next multiple of `TILE_K` any keys.
    pub columns: *const i32,
    /// (lists)
    pub column_counts: *const i32,
    /// A multiple of `TILE_K`.
    pub column_stride: i64,
}

/// A mask of blocks to the lists of [`BlockParams`]; what a query block does not see is left out.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockListParams {
    /// (num_lists, mask_blocks): not 0 where a key block is chosen.
    pub mask: *const u8,
    /// As many entries as the mask.
    pub key_blocks: *mut i32,
    /// (num_lists, 2)
    pub block_ranges: *mut i64,
    /// batch * num_heads * query_blocks
    pub num_lists: i32,
    /// Of the call.
    pub query_blocks: i32,
    /// Key blocks of the call.
    pub mask_blocks: i32,
    /// Of the call's first query block, on absolute positions.
    pub first_tile: i32,
    /// 1 if a query block sees the key blocks up to its own position, 0 if all.
    pub causal: i32,
}

/// The chosen keys of each head to the columns of [`ColumnParams`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ColumnListParams {
    /// (heads, k_len): not 0 where a key is chosen.
    pub keys: *const u8,
    /// (heads, query_blocks, mask_blocks): the key blocks of each query block, in which a key is left out.
    pub mask: *const u8,
    /// (heads, column_stride): the chosen keys of a head, ascending.
    pub head_columns: *mut i32,
    /// (heads)
    pub head_counts: *mut i32,
    /// (heads * query_blocks, column_stride)
    pub columns: *mut i32,
    /// (heads * query_blocks)
    pub column_counts: *mut i32,
    /// A multiple of `TILE_K`; further keys of a head are left out.
    pub column_stride: i64,
    /// Keys of the call.
    pub k_len: i32,
    /// Of the call.
    pub query_blocks: i32,
    /// Key blocks of the call.
    pub mask_blocks: i32,
    /// heads * query_blocks
    pub num_lists: i32,
    /// Position of the call's first query.
    pub q_offset: i32,
}

/// Algorithm 1 on the segments `first_segment .. first_segment + num_segments` of `num_heads` heads from the pointers on
/// (cuda/ranking_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RankingParams {
    /// (batch, q_len, num_heads, head_dim)
    pub q: *const c_void,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: *const c_void,
    /// Per (batch, head): the orders of the segments one after the other, segment `n` has `n * segment_len` keys.
    pub kv_perm: *mut i32,
    /// (batch, num_heads, segment, 3, head_dim), 16 bits each, segments from `coefficient_segment` on.
    pub coefficients: *mut u16,
    /// (batch, num_heads, num_segments, splits, 2 * head_dim + 1); unused with one split.
    pub partial_moments: *mut f32,
    /// (batch, num_heads, num_segments), zero at launch and zero again after it; likewise.
    pub arrivals: *mut u32,
    /// Laid out as `kv_perm`; the sort overwrites it.
    pub scores: *mut u16,
    /// A pair for each [`SCORE_BLOCK`](crate::ranking::SCORE_BLOCK) scores.
    pub score_ranges: *mut f32,
    /// (batch, num_heads, q_len): slot `r` of a segment's rows holds the row that comes there.
    pub q_perm: *mut i32,
    /// (batch, num_kv_heads, head_dim)
    pub key_guide: *mut f32,
    /// Of `q`.
    pub q_strides: Strides,
    /// Of `k`.
    pub k_strides: Strides,
    /// From head to head of `kv_perm`.
    pub kv_perm_head_stride: i64,
    /// From sequence to sequence of `coefficients`.
    pub coefficient_batch_stride: i64,
    /// From head to head of `coefficients`.
    pub coefficient_head_stride: i64,
    /// Sequences.
    pub batch: i32,
    /// Query heads.
    pub num_heads: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Queries.
    pub q_len: i32,
    /// Keys.
    pub k_len: i32,
    /// Tokens in a segment.
    pub segment_len: i32,
    /// First segment of the launch, on absolute positions.
    pub first_segment: i32,
    /// Segments of the launch.
    pub num_segments: i32,
    /// The segment that `coefficients` begin with.
    pub coefficient_segment: i32,
    /// Tokens `0..front_sink` lead every order.
    pub front_sink: i32,
    /// Rows from here on are the dense tail's: `q_perm` leaves them in place.
    pub ranked_rows: i32,
    /// A power of two, at most 16384, at least 4 for each thread of the sort.
    pub sort_buckets: i32,
    /// Entries that the sort places at a time, a multiple of 32, at most 65408.
    pub sort_window: i32,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
    /// Weight of the variance term; 0 ranks by the mean query alone.
    pub second_cumulant: f32,
}

/// Rows of `x`, with `delta` added and without, RMS-normalised (cuda/decoder_params.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NormParams {
    /// (rows, width)
    pub x: *const c_void,
    /// As `x`; or null, and then there is no sum.
    pub delta: *const c_void,
    /// (width)
    pub weight: *const c_void,
    /// As `x`.
    pub sum: *mut c_void,
    /// As `x`.
    pub out: *mut c_void,
    /// A multiple of [`VECTOR`](crate::decoder::VECTOR).
    pub width: i32,
    /// Added to the mean square.
    pub eps: f32,
}

/// `silu(gate) * up`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SiluParams {
    /// (rows, 2 * width): a row's gates and then its ups.
    pub gate_up: *const c_void,
    /// (rows, width)
    pub out: *mut c_void,
    /// A multiple of [`VECTOR`](crate::decoder::VECTOR).
    pub width: i64,
}

/// Queries and keys normalised or not and rotated; keys and values put into the cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RotateParams {
    /// (batch, len, num_heads + 2 * num_kv_heads, head_dim)
    pub qkv: *const c_void,
    /// (head_dim); or null: not normed.
    pub q_norm: *const c_void,
    /// As `q_norm`.
    pub k_norm: *const c_void,
    /// (2, len, head_dim / 2): cos and sin of the positions.
    pub table: *const f32,
    /// (batch, len, num_heads, head_dim)
    pub q_out: *mut c_void,
    /// (batch, len, num_kv_heads, head_dim), in the cache.
    pub k_out: *mut c_void,
    /// As `k_out`.
    pub v_out: *mut c_void,
    /// Of `k_out`.
    pub k_strides: Strides,
    /// Of `v_out`.
    pub v_strides: Strides,
    /// Positions.
    pub len: i32,
    /// Query heads.
    pub num_heads: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Of both norms.
    pub eps: f32,
}

/// cos and sin of consecutive positions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RotationParams {
    /// (half)
    pub inverse_frequencies: *const f32,
    /// (2, len, half): cos and sin.
    pub table: *mut f32,
    /// On both.
    pub factor: f64,
    /// Position of the first row.
    pub start: i64,
    /// Positions.
    pub len: i32,
    /// Frequencies.
    pub half: i32,
}

macro_rules! layout {
    ($type:ident: $size:literal $(, $field:ident at $offset:literal)*) => {
        const _: () = assert!(size_of::<$type>() == $size $(&& std::mem::offset_of!($type, $field) == $offset)*);
        // SAFETY: repr(C), integers, floats and addresses only; the headers in cuda/ assert the same size and offsets.
        unsafe impl Params for $type {}
    };
}

layout!(AttnParams: 176, q_strides at 48, batch at 144);
layout!(SparseParams: 248, kv_perm at 176, segment_len at 216);
layout!(SplitParams: 208, partial_out at 176);
layout!(BlockParams: 192, key_blocks at 176);
layout!(ColumnParams: 216, columns at 192);
layout!(BlockListParams: 48, num_lists at 24);
layout!(ColumnListParams: 80, k_len at 56);
layout!(RankingParams: 216, batch at 152);
layout!(NormParams: 48, width at 40);
layout!(SiluParams: 24, width at 16);
layout!(RotateParams: 120, k_strides at 56, len at 104);
layout!(RotationParams: 40, len at 32);
const _: () = assert!(size_of::<RowState>() == 8);

// Behind the macro that it uses.
mod selection;

pub use selection::{
    BlockPoolParams, QuerySharesParams, ROW_CUT_BYTES, ReorderParams, RowIndex, RowParams, StrideSharesParams,
    StridesParams,
};
