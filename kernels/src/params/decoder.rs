//! The steps of a decoder between its matrix products, and rows in 8 bits.

use std::ffi::c_void;

use super::{Params, Strides, layout};

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
    pub width: i64,
}

/// Rows in 8 bits with a scale each.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QuantiseParams {
    pub x: *const c_void,
    pub out: *mut c_void,
    pub scales: *mut f32,
    pub width: i64,
}

/// The product of rows with a matrix, in 8 or 16 bits (cuda/sm90/linear.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LinearParams {
    pub x: *const c_void,
    pub weight: *const c_void,
    pub x_scales: *const f32,
    pub weight_scales: *const f32,
    pub out: *mut c_void,
    pub rows: i32,
    pub width_in: i32,
    pub weight_rows: i32,
    pub is_gated: i32,
    pub adds: i32,
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

/// The heads of all ranks side by side (cuda/join_heads.cu).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct JoinHeadsParams {
    pub x: *const c_void,
    pub slots: *const u32,
    pub out: *mut c_void,
    pub rows: i64,
    pub groups: i32,
    pub of_rank: i32,
    pub pieces: i32,
}

/// The likeliest token of a row of logits (cuda/likeliest.cu).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LikeliestParams {
    pub logits: *const f32,
    pub out: *mut u32,
    pub size: i64,
}

layout!(NormParams: 56, width at 48);
layout!(SiluParams: 24, width at 16);
layout!(QuantiseParams: 32, width at 24);
layout!(LinearParams: 64, rows at 40);
layout!(RotateParams: 120, k_strides at 56, len at 104);
layout!(Int8Params: 104, row_strides at 24, len at 96);
layout!(RotationParams: 40, len at 32);
layout!(JoinHeadsParams: 48, rows at 24);
layout!(LikeliestParams: 24, size at 16);
