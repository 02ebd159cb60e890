//! What the published methods choose their blocks and keys by.

use std::ffi::c_void;

use super::{Params, RowState, Strides, layout};

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

layout!(BlockPoolParams: 88, strides at 32, heads at 80);
layout!(RowParams: 168, left_out_of at 88, row_len at 136);
layout!(LastQueryParams: 120, q_strides at 40, num_heads at 88);
layout!(ReorderParams: 112, k_strides at 40, num_heads at 88);
layout!(StridesParams: 56, num_heads at 32);
layout!(StrideSharesParams: 48, rows at 24);
