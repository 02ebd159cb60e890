//! Keys and values in pages on a GPU.

use std::ffi::c_void;

use candle_core::{DType, Shape, Tensor};
use cudarc::driver::DevicePtrMut;
use half::{bf16, f16};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Element, Grid, Launcher, Operand, check_i32, cuda_storage, to_i32};
use s2o_kernels::params::PagesParams;
use s2o_kernels::{Dtype, Function, Kernel, TILE_K};

use crate::error::FlashAttnError;
use crate::kernel::{VECTOR, cuda, integers};

/// Rows that a thread block copies.
const ROWS: usize = 8;

/// Keys and values in pages, which are their rows `page * page_len` and the next. The integers are i32 or u32 on the
/// device of the tensors, and contiguous.
#[derive(Debug)]
pub(crate) struct PageTable {
    /// (batch, pages).
    pub(crate) table: Tensor,
    pub(crate) page_len: usize,
    /// (batch, ranges, 2).
    pub(crate) ranges: Option<Tensor>,
}

impl PageTable {
    /// Number of ranges of each sequence.
    pub(crate) fn num_ranges(&self) -> usize {
        self.ranges.as_ref().map_or(0, |ranges| ranges.dims()[1])
    }

    /// Rows that can be copied at once, because no page border cuts them.
    pub(crate) fn box_rows(&self) -> usize {
        (1 << self.page_len.trailing_zeros()).min(TILE_K)
    }

    /// Whether a sequence of `len` tokens has enough pages.
    pub(crate) fn holds(&self, len: usize) -> bool {
        len.div_ceil(self.page_len) <= self.table.dims()[1]
    }

    /// The first `len` tokens of a sequence, in order: `[k, v]`, each (len, num_kv_heads, head_dim). Page numbers that do
    /// not exist become the nearest ones.
    pub(crate) fn side_by_side(
        &self,
        kv: [&Tensor; 2],
        sequence: usize,
        len: usize,
    ) -> Result<[Tensor; 2], FlashAttnError> {
        let head_dim = kv[0].dims()[3];
        if !self.holds(len) {
            let (max, got) = (self.table.dims()[1], len.div_ceil(self.page_len) as i64);
            return Err(FlashAttnError::OutOfRange { name: "pages of a sequence", max, got });
        }
        if !head_dim.is_multiple_of(VECTOR) {
            return Err(FlashAttnError::HeadDim { got: head_dim });
        }
        match kv[0].dtype() {
            DType::BF16 => self.copied::<bf16>(kv, sequence, len).map_err(cuda),
            DType::F16 => self.copied::<f16>(kv, sequence, len).map_err(cuda),
            got => Err(cuda(CudaError::DType { name: "k", got })),
        }
    }

    fn copied<T: Element>(&self, [k, v]: [&Tensor; 2], sequence: usize, len: usize) -> Result<[Tensor; 2], CudaError> {
        let (num_pages, page_len, num_heads, head_dim) = k.dims4()?;
        let launcher = Launcher::of(k)?;
        let stream = launcher.stream();
        let shape = Shape::from((len, num_heads, head_dim));
        let mut k_out = launcher.uninit::<T>(&shape)?;
        let mut v_out = launcher.uninit::<T>(&shape)?;
        {
            let (k, v) = (k.storage_and_layout(), v.storage_and_layout());
            let table = self.table.narrow(0, sequence, 1)?;
            let table = table.storage_and_layout();
            let (k, v) = (Operand::new(cuda_storage(&k.0)?, k.1)?, Operand::new(cuda_storage(&v.0)?, v.1)?);
            let ((k, _k), (v, _v)) = (k.view::<T>(stream)?, v.view::<T>(stream)?);
            let (table, _table) = integers(Some(&table), stream)?;
            let (k_out, _k_out) = k_out.device_ptr_mut(stream);
            let (v_out, _v_out) = v_out.device_ptr_mut(stream);
            check_i32("rows", len + ROWS)?;
            check_i32("elements of a few rows", (ROWS + 1) * num_heads * head_dim)?;
            let params = PagesParams {
                k: k.address as *const c_void,
                v: v.address as *const c_void,
                table,
                k_out: k_out as *mut c_void,
                v_out: v_out as *mut c_void,
                k_strides: k.strides,
                v_strides: v.strides,
                num_pages: to_i32("pages", num_pages)?,
                page_len: to_i32("page_block_size", page_len)?,
                num_heads: to_i32("num_kv_heads", num_heads)?,
                head_dim: to_i32("head_dim", head_dim)?,
                len: to_i32("max_seqlen_k", len)?,
            };
            let function = Function::new(Kernel::Pages, Dtype::Bf16, ANY_HEAD_DIM);
            // SAFETY: the grid covers all rows of the outputs, the table has their pages, page numbers are cut to those
            // that exist, and all is held until the enqueue.
            unsafe { launcher.launch(function, &params, Grid::Blocks([len.div_ceil(ROWS), 1, 1])) }?;
        }
        Ok([k_out, v_out].map(|slice| launcher.tensor(slice, shape.clone())))
    }
}
