//! Parameters of the kernels that methods choose keys with (cuda/selection_params.cuh, query_shares.cu, reorder.cu,
//! stride_shares.cu).

use std::ffi::c_void;

use super::{Params, RowState, Strides};

/// Blocks of tokens stood for by their means.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockPoolParams {
    /// (batch, len, heads, head_dim)
    pub x: *const c_void,
    /// (batch, heads, head_dim), taken off every token first; or null.
    pub centre: *const f32,
    /// (batch, heads, blocks, head_dim)
    pub means: *mut f32,
    /// (batch, heads, blocks): square of the norm of the mean of the normalised tokens; or null.
    pub alike: *mut f32,
    /// Of `x`.
    pub strides: Strides,
    /// Absolute position of the first token: blocks are cut at multiples of `block`.
    pub offset: i64,
    /// Tokens of a sequence.
    pub len: i64,
    /// Tokens of a block.
    pub block: i64,
    /// Of `x`.
    pub heads: i32,
    /// Of a sequence.
    pub blocks: i32,
}

/// Row `r` has entry `r / each % count` of an operand that rows share.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowIndex {
    /// Consecutive rows of one entry.
    pub each: i32,
    /// Entries.
    pub count: i32,
}

/// Rows of scores and what is chosen of them. Hidden entries, not seen or not trusted, have no
/// part in softmax, sum or count. Operands that are not there are null.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RowParams {
    /// (rows, row_len), non-negative without a softmax.
    pub scores: *const f32,
    /// The choices: (rows, ceil(row_len / merged)), 1 where an entry is chosen.
    pub mask: *mut u8,
    /// The softmax: (rows, row_len), zeros where hidden.
    pub weights: *mut f32,
    /// The share of a row's sum that need not be chosen; 0 or less chooses all that is seen.
    pub left_out: *const f32,
    /// (rows): how many are chosen; this or `left_out`.
    pub counts: *const f32,
    /// Four numbers: columns seen from the first on; and of them chosen whatever they score the first columns, and a range.
    pub bounds: *const u32,
    /// Rows of row_len: 0 hides an entry and chooses it.
    pub trusted: *const u8,
    /// Rows of row_len: not 0 chooses an entry whatever it scores.
    pub kept: *const u8,
    /// Not 0 chooses all that a row sees.
    pub whole: *const u8,
    /// 0 chooses no more of a row than is kept.
    pub asked: *const u8,
    /// [`ROW_CUT_BYTES`] for each long row of a launch, zero before the first.
    pub cuts: *mut c_void,
    /// Of `left_out`.
    pub left_out_of: RowIndex,
    /// Of `bounds`.
    pub bounds_of: RowIndex,
    /// Of `trusted`.
    pub trusted_of: RowIndex,
    /// Of `kept`.
    pub kept_of: RowIndex,
    /// Of `whole`.
    pub whole_of: RowIndex,
    /// Of `asked`.
    pub asked_of: RowIndex,
    /// At most 2^30.
    pub row_len: i32,
    /// From `first_row` on, those of the launch.
    pub rows: i32,
    /// Of the launch; 0 but for long rows.
    pub first_row: i32,
    /// 1: of the scores times `scale`.
    pub softmax: i32,
    /// Of the softmax.
    pub scale: f32,
    /// 1: what is kept or in bounds counts, before all else; 0: it is chosen beside the choice.
    pub kept_first: i32,
    /// 1, or 2: columns 2i and 2i+1 are one of the mask, chosen if either is.
    pub merged: i32,
    /// Of a long row: 0, 1 and 2 find a digit of the cut, 3 writes the mask.
    pub pass: i32,
}

/// Bytes of what is known of a long row on the way to its cut.
pub const ROW_CUT_BYTES: usize = 18464;

/// How the last queries share out their attention.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QuerySharesParams {
    /// (batch, rows, num_heads, head_dim): the last queries.
    pub q: *const c_void,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: *const c_void,
    /// (batch * num_heads, state_chunks, 128), of scaled scores in units of log 2; written by the first pass.
    pub states: *mut RowState,
    /// (batch * num_heads, k_len), by the second pass.
    pub by_key: *mut f32,
    /// As `by_key`; or null.
    pub by_distance: *mut f32,
    /// Of `q`.
    pub q_strides: Strides,
    /// Of `k`.
    pub k_strides: Strides,
    /// Query heads.
    pub num_heads: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Queries, at most 128.
    pub rows: i32,
    /// Keys.
    pub k_len: i32,
    /// Tiles of 64 keys, or blocks of 64 distances, of a block of threads.
    pub tiles_per_chunk: i32,
    /// Parts that the first pass cuts the keys into.
    pub state_chunks: i32,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
}

/// Keys and values in another order, and behind them as they were.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ReorderParams {
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: *const c_void,
    /// As `k`.
    pub v: *const c_void,
    /// (batch, num_heads, before)
    pub positions: *const u32,
    /// (batch, before + k_len, num_heads, head_dim)
    pub k_out: *mut c_void,
    /// As `k_out`.
    pub v_out: *mut c_void,
    /// Of `k`.
    pub k_strides: Strides,
    /// Of `v`.
    pub v_strides: Strides,
    /// Of the outputs, a multiple of `num_kv_heads`.
    pub num_heads: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Reordered keys.
    pub before: i32,
    /// Keys.
    pub k_len: i32,
    /// A multiple of 8.
    pub head_dim: i32,
}

/// The tokens of a sequence by head, with zeros before and behind them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StridesParams {
    /// (len, num_heads, head_dim)
    pub x: *const c_void,
    /// (num_heads, slots, head_dim)
    pub out: *mut c_void,
    /// Of `x`, from token to token.
    pub seq_stride: i64,
    /// Of `x`, from head to head.
    pub head_stride: i64,
    /// Heads.
    pub num_heads: i32,
    /// Tokens.
    pub len: i32,
    /// Tokens and zeros, a multiple of `stride`.
    pub slots: i32,
    /// Slots before the first token.
    pub before: i32,
    /// 0: in order, else backwards in each stride.
    pub stride: i32,
    /// A multiple of 8.
    pub head_dim: i32,
}

/// What blocks of key strides weigh for blocks of query strides.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StrideSharesParams {
    /// (num_heads, rows, columns)
    pub products: *const c_void,
    /// (rows): columns that a row sees; 0: it weighs nothing.
    pub limits: *const u32,
    /// (num_heads, rows / per_block, key_blocks), zeros beyond the columns.
    pub out: *mut f32,
    /// A multiple of `per_block`.
    pub rows: i32,
    /// Likewise.
    pub columns: i32,
    /// Strides of a block, a power of two up to 128.
    pub per_block: i32,
    /// Of the output.
    pub key_blocks: i32,
    /// Factor on the products.
    pub scale: f32,
}

layout!(BlockPoolParams: 88, strides at 32, heads at 80);
layout!(RowParams: 168, left_out_of at 88, row_len at 136);
layout!(QuerySharesParams: 120, q_strides at 40, num_heads at 88);
layout!(ReorderParams: 112, k_strides at 40, num_heads at 88);
layout!(StridesParams: 56, num_heads at 32);
layout!(StrideSharesParams: 48, rows at 24);
