//! Attention to all keys in a given order: the paper's ladder without causality.

use std::ptr;

use candle_core::Tensor;
use s2o_core::{Mask, Permutation};
use s2o_cuda::{CudaError, Grid, KernelTime, Regions, to_i32};
use s2o_kernels::params::{S2oParams, UnitList};
use s2o_kernels::{Kernel, TILE_K, TILE_Q};

use super::call::{Call, CudaOp};
use super::timed::Timed;
use crate::attn_op::{AttnOp, apply};
use crate::error::AttnError;

/// Attention of every query to ALL keys in the order `kv_perm[b * num_heads + h]` of its head, and the time of the
/// kernel: the ladder of the paper's Tables 4-6 without causality. Shapes and dtypes are those of
/// [`dense_attn`](crate::dense_attn), and k_len must be a multiple of 128. Tiles of 128 queries stop early at `tau` as
/// in S2O. 0 never stops.
///
/// # Errors
/// If the tensors do not fit, see [`AttnError`]; [`CudaError::Size`](super::CudaError::Size) if k_len or the orders do
/// not fit.
pub fn gather_attn_timed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    kv_perm: &[Permutation],
    tau: f32,
) -> Result<(Tensor, Vec<KernelTime>), AttnError> {
    apply(&Timed(LadderOp { kv_perm, tau }), softmax_scale, [q, k, v])
}

/// Attention of every query to all keys in the order of its head, until `tau` stops it.
#[derive(Debug)]
struct LadderOp<'a> {
    kv_perm: &'a [Permutation],
    tau: f32,
}

impl AttnOp for LadderOp<'_> {
    const NAME: &'static str = "ladder-attention";
    type Report = ();
}

impl CudaOp for LadderOp<'_> {
    fn run(&self, call: &Call) -> Result<(), AttnError> {
        Ok(launch(call, self.kv_perm, self.tau)?)
    }
}

fn launch(call: &Call, orders: &[Permutation], tau: f32) -> Result<(), CudaError> {
    let shape = &call.shape;
    let (heads, k_len) = (shape.batch() * shape.num_heads(), shape.k_len());
    let refuse = |name, expected: String, got| Err(CudaError::Size { name, expected, got });
    if !k_len.is_multiple_of(TILE_K) {
        return refuse("k_len", format!("a multiple of {TILE_K}"), k_len);
    }
    if orders.len() != heads {
        return refuse("orders", format!("{heads}, one per head"), orders.len());
    }
    if let Some(order) = orders.iter().find(|order| order.len() != k_len) {
        return refuse("keys of an order", k_len.to_string(), order.len());
    }
    let mut regions = Regions::default();
    let next_item = regions.add::<i32>(1);
    let kv_perm = regions.add::<i32>(heads * k_len);
    let scratch = call.allocate(&regions)?;
    scratch.zero(next_item)?;
    let tokens: Vec<i32> = orders.iter().flat_map(Permutation::as_slice).map(|&token| token as i32).collect();
    scratch.upload(kv_perm, &tokens)?;
    let params = S2oParams {
        attn: call.params(Mask::Full, scratch.at(next_item))?,
        kv_perm: scratch.at(kv_perm),
        kv_perm_head_stride: k_len as i64,
        q_perm: ptr::null(),
        state: ptr::null_mut(),
        tiles_visited: ptr::null_mut(),
        out_norm: ptr::null_mut(),
        units: UnitList::ALL,
        segment_len: to_i32("k_len", k_len)?,
        first_segment: 0,
        num_segments: 1,
        ranked_rows: to_i32("q_len", shape.q_len())?,
        tau,
        stop_rule: 0,
        literal_frame: 0,
        discard: 0,
    };
    let kernel = if tau == 0.0 { Kernel::LadderFull } else { Kernel::Ladder };
    let items = shape.q_len().div_ceil(TILE_Q) * heads;
    // SAFETY: both kernels take S2oParams. Every head has an order of all keys, which is a permutation, and the scratch
    // memory is released on this stream after the launch.
    unsafe { call.launch(kernel, &params, Grid::Persistent { items }) }
}
