//! The order of the keys.

use std::ffi::c_void;

use super::{Params, Strides, layout};

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
    pub buckets: *mut u16,
    pub score_ranges: *mut f32,
    pub q_perm: *mut i32,
    pub key_guide: *mut f32,
    pub prefix_factors: *mut f32,
    pub prefix_score: *mut f32,
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
    pub sorted_keys: i32,
    pub zeroed: i32,
}

layout!(RankingParams: 248, batch at 176, zeroed at 244);
