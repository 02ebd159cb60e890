//! [`Call`]: one attention call on the GPU.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::{mem, ptr};

use candle_core::{CudaStorage, DType, Layout};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_core::{AttnShape, Mask, ScoreScale};
use s2o_cuda::{CudaError, Element, Grid, Launcher, Operand, Regions, Scratch, Stopwatch, View, head_dim, to_i32};
use s2o_kernels::params::{AttnParams, Params};
use s2o_kernels::{Dtype, Function, HeadDim, Kernel};

use crate::attn_op::{AttnOp, Compute, Qkv};
use crate::error::AttnError;

/// Bytes of keys and values that should stay in L2 while their queries read them.
const L2_BYTES: usize = 32 << 20;
/// Bytes of an f16 or bf16 element.
const ELEMENT_BYTES: usize = mem::size_of::<f16>();

/// An op on a GPU.
pub(super) trait CudaOp: AttnOp {
    /// The head size of the kernels that compute a call of this shape.
    fn head_dim(&self, shape: &AttnShape, _: ScoreScale) -> Result<HeadDim, CudaError> {
        head_dim(Kernel::Dense, shape.head_dim())
    }

    /// Enqueues the kernels of the op.
    fn run(&self, call: &Call) -> Result<Self::Report, AttnError>;
}

/// One attention call: its tensors on the device, and the launcher of its kernels.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) shape: AttnShape,
    pub(super) launcher: Launcher,
    pub(super) q: View,
    pub(super) k: View,
    v: View,
    /// Absent for an op without an output.
    out: Option<View>,
    pub(super) scale: ScoreScale,
    dtype: Dtype,
    /// Of the kernels; heads of [`decode`](super::decode) may be narrower.
    pub(super) head_dim: HeadDim,
}

impl<K: CudaOp> Compute<CudaStorage> for K {
    fn compute(&self, qkv: &Qkv<'_, CudaStorage>) -> Result<(Option<CudaStorage>, K::Report), AttnError> {
        if qkv.scale.softmax_scale <= 0.0 {
            return Err(CudaError::SoftmaxScale { got: qkv.scale.softmax_scale }.into());
        }
        match qkv.dtype {
            DType::BF16 => typed::<bf16, K>(self, qkv),
            DType::F16 => typed::<f16, K>(self, qkv),
            got => Err(CudaError::DType { name: "q", got }.into()),
        }
    }
}

fn typed<T: Element, K: CudaOp>(
    op: &K,
    qkv: &Qkv<'_, CudaStorage>,
) -> Result<(Option<CudaStorage>, K::Report), AttnError> {
    let &Qkv { shape, scale, operands, .. } = qkv;
    let head_dim = op.head_dim(&shape, scale)?;
    let device = &operands[0].0.device;
    let launcher = Launcher::new(device)?;
    let [q, k, v] = operands;
    let [q, k, v] = [Operand::new(q.0, q.1)?, Operand::new(k.0, k.1)?, Operand::new(v.0, v.1)?];
    let out_layout = Layout::contiguous(operands[0].1.shape());
    // The kernels write every row of every head.
    let mut out = K::HAS_OUTPUT.then(|| launcher.uninit::<T>(out_layout.shape())).transpose()?;
    let report = {
        let stream = launcher.stream();
        let ((q, _q), (k, _k), (v, _v)) = (q.view::<T>(stream)?, k.view::<T>(stream)?, v.view::<T>(stream)?);
        let out = out.as_mut().map(|out| out.device_ptr_mut(stream));
        let out = out.as_ref().map(|(address, _)| View::new::<T>(*address, &out_layout)).transpose()?;
        let launcher = launcher.clone();
        op.run(&Call { shape, launcher, q, k, v, out, scale, dtype: T::DTYPE, head_dim })?
    };
    Ok((out.map(|out| CudaStorage::wrap_cuda_slice(out, device.clone())), report))
}

impl Call {
    /// The same call with timed launches.
    pub(super) fn timed(&self, stopwatch: &Arc<Stopwatch>) -> Self {
        self.by(self.launcher.timed(stopwatch))
    }

    /// The same call by another launcher of the GPU.
    pub(super) fn by(&self, launcher: Launcher) -> Self {
        Self { launcher, ..self.clone() }
    }

    /// Parameters that all attention kernels share. `next_item` is a counter that is zero when the kernel starts.
    pub(super) fn params(&self, mask: Mask, next_item: *mut i32) -> Result<AttnParams, CudaError> {
        let Self { shape, q, k, v, .. } = self;
        let out = self.out.expect("an op that launches attention has an output");
        let heads = shape.batch() * shape.num_heads();
        let kv_bytes = 2 * shape.k_len() * shape.head_dim() * ELEMENT_BYTES;
        let heads_per_section = (L2_BYTES / kv_bytes).max(1) * shape.group_size();
        Ok(AttnParams {
            q: q.address as *const c_void,
            k: k.address as *const c_void,
            v: v.address as *const c_void,
            out: out.address as *mut c_void,
            lse: ptr::null_mut(),
            next_item,
            q_strides: q.strides,
            k_strides: k.strides,
            v_strides: v.strides,
            out_strides: out.strides,
            batch: to_i32("batch", shape.batch())?,
            num_heads: to_i32("num_heads", shape.num_heads())?,
            num_kv_heads: to_i32("num_kv_heads", shape.num_kv_heads())?,
            q_len: to_i32("q_len", shape.q_len())?,
            k_len: to_i32("k_len", shape.k_len())?,
            causal: i32::from(mask.is_causal()),
            heads_per_section: to_i32("heads", heads_per_section.min(heads))?,
            // Capped scores are in units of the cap.
            softmax_scale: self.scale.softcap.unwrap_or(self.scale.softmax_scale),
            cap_scale: self.scale.softcap.map_or(0.0, |softcap| self.scale.softmax_scale / softcap),
            head_dim: to_i32("head_dim", shape.head_dim())?,
        })
    }

    /// The call with only the queries from `first` on. With a causal mask they are still the last positions.
    pub(super) fn rows_from(&self, first: usize) -> Self {
        let shape = self.shape;
        let q_dims = [shape.batch(), shape.q_len() - first, shape.num_heads(), shape.head_dim()];
        let shape = AttnShape::new(q_dims, [shape.k_len(), shape.num_kv_heads()]).expect("a part of a checked shape");
        let rows = |view: View| view.rows_from(first, ELEMENT_BYTES);
        Self { shape, q: rows(self.q), out: self.out.map(rows), ..self.clone() }
    }

    /// The call of some of its sequences and KV heads, with the query heads of these.
    pub(super) fn part(&self, batch: Range<usize>, kv_heads: Range<usize>) -> Self {
        let group = self.shape.group_size();
        let heads = kv_heads.start * group..kv_heads.end * group;
        let q_dims = [batch.len(), self.shape.q_len(), heads.len(), self.shape.head_dim()];
        let shape = AttnShape::new(q_dims, [self.shape.k_len(), kv_heads.len()]).expect("a part of a checked shape");
        let of = |view: View, heads: &Range<usize>| view.part(batch.clone(), heads.clone(), ELEMENT_BYTES);
        let [k, v] = [self.k, self.v].map(|view| of(view, &kv_heads));
        Self { shape, q: of(self.q, &heads), k, v, out: self.out.map(|out| of(out, &heads)), ..self.clone() }
    }

    /// Scratch memory for this call.
    pub(super) fn allocate(&self, regions: &Regions) -> Result<Scratch, CudaError> {
        self.launcher.allocate(regions)
    }

    /// A kernel for the elements, heads and scores of this call.
    pub(super) fn function(&self, kernel: Kernel) -> Function {
        let capped = self.scale.softcap.is_some() && kernel.has_capped();
        Function { capped, ..Function::new(kernel, self.dtype, self.head_dim) }
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `params` must be the type that the kernel takes. Every address in it must point to the data described in
    /// params.cuh until the kernel has run.
    pub(super) unsafe fn launch<P: Params>(&self, kernel: Kernel, params: &P, grid: Grid) -> Result<(), CudaError> {
        // SAFETY: passed on.
        unsafe { self.launch_with(kernel, self.q, params, grid) }
    }

    /// Enqueues a kernel on other queries.
    ///
    /// # Safety
    /// As [`Call::launch`]; `q` must be the queries in `params`.
    pub(super) unsafe fn launch_with<P: Params>(
        &self,
        kernel: Kernel,
        q: View,
        params: &P,
        grid: Grid,
    ) -> Result<(), CudaError> {
        // SAFETY: kernels that take tensor maps take those of q, k and v. The caller guarantees the rest.
        unsafe { self.launcher.launch_on(self.function(kernel), [q, self.k, self.v], params, grid) }
    }
}
