//! Messages that run while the GPU computes the next ones.

use std::ffi::{c_int, c_void};

use candle_core::{Shape, Tensor};
use cudarc::driver::{CudaSlice, DevicePtrMut, result, sys};
use s2o_cuda::{CudaError, Launcher, SideStream, unaligned_address};

use super::{Element, Nccl, SUM};
use crate::{CommError, Result};

/// Rows of all ranks, or their sum, that arrive part by part next to the kernels.
struct Arrivals<'a, T> {
    launcher: Launcher,
    shape: Shape,
    // Before `out`: messages also write to it.
    held: Held<'a>,
    out: CudaSlice<T>,
}

/// What messages read. When it is released, the kernels follow the messages.
struct Held<'a> {
    messages: &'a SideStream,
    tensors: Vec<Tensor>,
}

impl Held<'_> {
    fn release(&mut self) -> std::result::Result<(), CudaError> {
        if !self.tensors.is_empty() {
            self.messages.kernels_follow(&self.messages.mark()?)?;
            self.tensors.clear();
        }
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // After an error of the driver nothing runs any more.
        let _ = self.release();
    }
}

impl<'a, T: Element> Arrivals<'a, T> {
    fn new(nccl: &'a Nccl, rows: usize, width: usize) -> Result<Self> {
        let (launcher, shape) = (Launcher::new(&nccl.device)?, Shape::from((rows, width)));
        let out = launcher.uninit::<T>(&shape)?;
        Ok(Self { launcher, shape, held: Held { messages: &nccl.messages, tensors: Vec::new() }, out })
    }

    /// The rows of `x`, which must have the width and dtype of the first part.
    fn rows_of(&self, name: &'static str, x: &Tensor) -> Result<usize> {
        let width = self.shape.dims()[1];
        match *x.dims() {
            [rows, this] if this == width && x.dtype() == T::DTYPE => Ok(rows),
            ref dims => {
                let expected = format!("shape (rows, {width}) of {:?}, as the first", T::DTYPE);
                Err(CommError::size(name, expected, format!("{dims:?} of {:?}", x.dtype())))
            }
        }
    }

    /// Address of row `row` of the result.
    fn row(&mut self, row: usize) -> sys::CUdeviceptr {
        let start = row * self.shape.dims()[1] * size_of::<T>();
        let (out, _) = self.out.device_ptr_mut(self.launcher.stream());
        out + start as sys::CUdeviceptr
    }

    /// Lets later messages follow the kernels that computed `x`, and keeps it. Returns its address and number of elements.
    fn hold(&mut self, x: Tensor) -> Result<(sys::CUdeviceptr, usize)> {
        let x = x.contiguous()?;
        let address = {
            let (storage, layout) = x.storage_and_layout();
            unaligned_address::<T>(&storage, layout, self.launcher.stream())?.0
        };
        let count = x.elem_count();
        self.held.tensors.push(x);
        self.held.messages.follow_kernels()?;
        Ok((address, count))
    }

    /// The result, for kernels that are enqueued from now on.
    fn finish(mut self) -> Result<Tensor> {
        self.held.release()?;
        Ok(self.launcher.tensor(self.out, self.shape))
    }
}

impl Nccl {
    /// Exchanges rows, of which those for the next rank, `first`, are computed.
    pub(super) fn exchange_computed<T: Element>(
        &self,
        first: Tensor,
        send: &mut dyn FnMut(usize) -> candle_core::Result<Tensor>,
        rows: &[usize],
    ) -> Result<Tensor> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let width = first.dims2()?.1;
        let mut arrivals = Arrivals::<T>::new(self, rows.iter().sum(), width)?;
        let mut first = Some(first);
        // In step `step` each rank sends to the rank that follows by `step`. The own rows are computed last, next to the
        // last message.
        for step in 1..=ranks {
            let (to, from) = ((rank + step) % ranks, (rank + ranks - step) % ranks);
            let x = first.take().map_or_else(|| send(to), Ok)?;
            let sent = arrivals.rows_of("sends", &x)?;
            let received = arrivals.row(rows[..from].iter().sum());
            if to == rank {
                if sent != rows[rank] {
                    return Err(CommError::size("rows", format!("{sent} from this rank, as in sends"), rows[rank]));
                }
                let (storage, layout) = x.storage_and_layout();
                let stream = self.device.cuda_stream();
                let from = unaligned_address::<T>(&storage, layout, &stream)?.0;
                // SAFETY: both hold the rows, and are used in the order of the kernels' stream.
                unsafe { result::memcpy_dtod_async(received, from, sent * width * size_of::<T>(), stream.cu_stream()) }
                    .map_err(candle_core::Error::wrap)?;
                continue;
            }
            let (address, count) = arrivals.hold(x)?;
            self.enqueue(self.messages.bound()?.cast(), |nccl, handle, stream| {
                // SAFETY: as in `exchange_rows`; `arrivals` holds the memory until the kernels follow the messages.
                unsafe {
                    nccl.check("beginning a group of messages", (nccl.group_start)())?;
                    if count > 0 {
                        let address = address as *const c_void;
                        let sent = (nccl.send)(address, count, T::NUMBER, to as c_int, handle, stream);
                        nccl.check("sending", sent)?;
                    }
                    if rows[from] > 0 {
                        let (address, count) = (received as *mut c_void, rows[from] * width);
                        let arrives = (nccl.recv)(address, count, T::NUMBER, from as c_int, handle, stream);
                        nccl.check("receiving", arrives)?;
                    }
                    nccl.check("sending and receiving", (nccl.group_end)())
                }
            })?;
        }
        arrivals.finish()
    }

    /// Adds slices of rows, of which the first is computed.
    pub(super) fn sum_computed<T: Element>(
        &self,
        first: Tensor,
        slices: &mut dyn Iterator<Item = candle_core::Result<Tensor>>,
        rows: usize,
    ) -> Result<Tensor> {
        let mut arrivals = Arrivals::<T>::new(self, rows, first.dims2()?.1)?;
        let mut done = 0;
        for slice in std::iter::once(Ok(first)).chain(slices) {
            let slice = slice?;
            let start = done;
            done += arrivals.rows_of("slices", &slice)?;
            if done > rows {
                break;
            }
            let (from, count) = arrivals.hold(slice)?;
            let to = arrivals.row(start);
            self.enqueue(self.messages.bound()?.cast(), |nccl, handle, stream| {
                let (from, to) = (from as *const c_void, to as *mut c_void);
                // SAFETY: as in `sum`; `arrivals` holds the memory until the kernels follow the messages.
                nccl.check("adding", unsafe { (nccl.all_reduce)(from, to, count, T::NUMBER, SUM, handle, stream) })
            })?;
        }
        if done != rows {
            return Err(CommError::size("slices", format!("{rows} rows together"), done));
        }
        arrivals.finish()
    }
}
