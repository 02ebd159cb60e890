//! [`Call`]: one attention call on its way to the GPU, and the launches it makes.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut};
use candle_core::{CudaStorage, DType, Layout, Shape};
use half::{bf16, f16};
use s2o_core::{AttnShape, S2oError};
use s2o_kernels::params::{AttnParams, Params};
use s2o_kernels::{Dtype, Function, HeadDim, Kernel as KernelName};

use super::error::{CudaError, Doing, int};
use super::library::{Entry, Library};
use super::memory::{Regions, Scratch};
use super::operand::{Element, Operand, View};
use super::stopwatch::Stopwatch;
use super::tensor_map::TensorMap;
use crate::error::AttnError;
use crate::op::Kernel;

/// Keys and values that should stay in L2 while their queries walk over them.
const L2_BYTES: usize = 32 << 20;

/// One attention call: the tensors on the device and the stream to enqueue on, which is Candle's own.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(super) shape: AttnShape,
    pub(super) stream: Arc<CudaStream>,
    pub(super) library: Arc<Library>,
    pub(super) q: View,
    pub(super) k: View,
    pub(super) v: View,
    pub(super) out: View,
    pub(super) softmax_scale: f32,
    dtype: Dtype,
    head_dim: HeadDim,
    stopwatch: Option<Arc<Stopwatch>>,
}

/// Runs `kernel` on `q`, `k`, `v`: the output has the shape of `q`, contiguous.
pub(crate) fn run<K: Kernel>(
    kernel: &K,
    operands: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, Shape, K::Report), AttnError> {
    let dims = operands.map(|(_, layout)| <[usize; 4]>::try_from(layout.dims()));
    let [Ok(q), Ok(k), Ok(v)] = dims else {
        let rank = |(name, (_, layout)): (_, &(_, &Layout))| (name, layout.dims().to_vec());
        let mut named = ["q", "k", "v"].into_iter().zip(&operands).map(rank);
        let (name, got) = named.find(|(_, got)| got.len() != 4).expect("one has another rank");
        return Err(AttnError::Rank { name, got });
    };
    let shape = AttnShape::of(q, k, v).map_err(S2oError::from)?;
    if !kernel.softmax_scale().is_finite() {
        return Err(S2oError::SoftmaxScale { got: kernel.softmax_scale() }.into());
    }
    if kernel.softmax_scale() <= 0.0 {
        return Err(CudaError::SoftmaxScale { got: kernel.softmax_scale() }.into());
    }
    let expected = operands[0].0.dtype();
    for (name, (storage, _)) in ["q", "k", "v"].into_iter().zip(operands) {
        let got = storage.dtype();
        if got != expected {
            return Err(AttnError::DTypeMismatch { name, expected, got });
        }
    }
    match expected {
        DType::BF16 => typed::<bf16, K>(kernel, shape, operands),
        DType::F16 => typed::<f16, K>(kernel, shape, operands),
        got => Err(CudaError::DType { name: "q", got }.into()),
    }
}

fn typed<T: Element, K: Kernel>(
    kernel: &K,
    shape: AttnShape,
    operands: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, Shape, K::Report), AttnError> {
    let head_dim = HeadDim::new(shape.head_dim()).ok_or(CudaError::HeadDim { got: shape.head_dim() })?;
    let device = &operands[0].0.device;
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().doing("binding the context")?;
    let library = Library::of(&stream)?;
    let [q, k, v] = operands;
    let [q, k, v] = [Operand::new(q.0, q.1)?, Operand::new(k.0, k.1)?, Operand::new(v.0, v.1)?];
    let out_shape = Shape::from(operands[0].1.dims());
    // SAFETY: the kernels write every row of every head; the ranking alone writes none, and nobody reads its output.
    let mut out = unsafe { device.alloc::<T>(out_shape.elem_count()) }?;
    let report = {
        let ((q, _q), (k, _k), (v, _v)) = (q.view::<T>(&stream)?, k.view::<T>(&stream)?, v.view::<T>(&stream)?);
        let (address, _out) = out.device_ptr_mut(&stream);
        let out = View::new::<T>(address, &Layout::contiguous(&out_shape));
        let softmax_scale = kernel.softmax_scale();
        let stream = Arc::clone(&stream);
        let (dtype, stopwatch) = (T::DTYPE, None);
        kernel.cuda(&Call { shape, stream, library, q, k, v, out, softmax_scale, dtype, head_dim, stopwatch })?
    };
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), out_shape, report))
}

/// How many blocks a launch has.
pub(super) enum Grid {
    /// Blocks that take items from a counter: as many as the GPU holds at once, or fewer if there are fewer items.
    Persistent {
        /// Of the launch.
        items: usize,
    },
    /// One warp for each row.
    Warps {
        /// Of the launch.
        rows: usize,
    },
    /// As many blocks as said, in x, y and z.
    Blocks([usize; 3]),
    /// The same for a kernel that leaves its threads or its dynamic shared memory to the launch.
    Shaped { blocks: [usize; 3], threads: Option<usize>, shared_bytes: usize },
}

impl Call {
    /// Sizes of the call.
    pub(crate) fn shape(&self) -> &AttnShape {
        &self.shape
    }

    /// The same call, its launches timed.
    pub(crate) fn timed(&self, stopwatch: &Arc<Stopwatch>) -> Self {
        Self { stopwatch: Some(Arc::clone(stopwatch)), ..self.clone() }
    }

    /// Parameters that all attention kernels share. `next_item` is a counter that is zero when the kernel starts.
    pub(super) fn params(&self, causal: bool, next_item: *mut i32) -> Result<AttnParams, CudaError> {
        let Self { shape, q, k, v, out, .. } = self;
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
            batch: int("batch", shape.batch())?,
            num_heads: int("num_heads", shape.num_heads())?,
            num_kv_heads: int("num_kv_heads", shape.num_kv_heads())?,
            q_len: int("q_len", shape.q_len())?,
            k_len: int("k_len", shape.k_len())?,
            causal: i32::from(causal),
            heads_per_section: int("heads", heads_per_section.min(heads))?,
            softmax_scale: self.softmax_scale,
        })
    }

    /// The call for the queries from `first` on alone; causal, they still are the last of the positions.
    pub(super) fn rows_from(&self, first: usize) -> Self {
        let shape = self.shape;
        let q_dims = [shape.batch(), shape.q_len() - first, shape.num_heads(), shape.head_dim()];
        let shape = AttnShape::new(q_dims, [shape.k_len(), shape.num_kv_heads()]).expect("a part of a checked shape");
        let [q, out] = [self.q, self.out].map(|view| view.rows_from(first, ELEMENT_BYTES));
        Self { shape, q, out, ..self.clone() }
    }

    /// Scratch memory for this call.
    pub(super) fn allocate(&self, regions: &Regions) -> Result<Scratch, CudaError> {
        self.library.pool.allocate(&self.stream, regions)
    }

    /// A kernel, loaded.
    pub(super) fn entry(&self, kernel: KernelName) -> Result<Entry, CudaError> {
        self.library.entry(Function::new(kernel, self.dtype, self.head_dim), &self.stream)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `params` must be what the kernel takes, and every address in it must hold what params.cuh says until the kernel
    /// has run.
    pub(super) unsafe fn launch<P: Params>(&self, kernel: KernelName, params: &P, grid: Grid) -> Result<(), CudaError> {
        let entry = self.entry(kernel)?;
        let (mut threads, mut shared_bytes) = (entry.info.threads as usize, entry.info.shared_bytes as usize);
        let blocks = match grid {
            Grid::Persistent { items } => {
                int("work items", items)?;
                [items.min(self.library.multiprocessors * entry.info.blocks_per_sm as usize), 1, 1]
            }
            Grid::Warps { rows } => [rows.div_ceil(threads / 32), 1, 1],
            Grid::Blocks(blocks) => blocks,
            Grid::Shaped { blocks, threads: of_block, shared_bytes: bytes } => {
                threads = of_block.unwrap_or(threads);
                shared_bytes = bytes;
                blocks
            }
        };
        if blocks.contains(&0) {
            return Ok(());
        }
        let maps = match entry.info.tensor_maps {
            0 => Vec::new(),
            _ => [self.q, self.k, self.v]
                .iter()
                .map(|view| TensorMap::new(view, self.dtype))
                .collect::<Result<Vec<_>, _>>()?,
        };
        let mut arguments: Vec<*mut c_void> = maps.iter().map(|map| ptr::from_ref(map) as *mut c_void).collect();
        arguments.push(ptr::from_ref(params) as *mut c_void);
        let mut launch = || {
            // SAFETY: the kernel takes the descriptors it asks for and then its parameters, by value. That they are the
            // right ones is the caller's promise.
            unsafe { entry.launch(&self.stream, blocks, threads, shared_bytes, &mut arguments) }
        };
        match &self.stopwatch {
            Some(stopwatch) => stopwatch.time(kernel, &self.stream, launch),
            None => launch(),
        }
    }
}

/// Of both element types.
const ELEMENT_BYTES: usize = 2;
