//! Parameters of the kernels that methods choose keys with (cuda/query_shares.cu, reorder.cu, stride_shares.cu).

use std::ffi::c_void;

use super::{Params, RowState, Strides};

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

layout!(QuerySharesParams: 120, q_strides at 40, num_heads at 88);
layout!(ReorderParams: 112, k_strides at 40, num_heads at 88);
layout!(StridesParams: 56, num_heads at 32);
layout!(StrideSharesParams: 48, rows at 24);
