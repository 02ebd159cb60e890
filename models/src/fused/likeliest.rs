//! The likeliest token, chosen on a GPU.

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use cudarc::driver::{CudaEvent, CudaStream, DevicePtrMut, DriverError, PinnedHostSlice};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Grid, Launcher, unaligned_address};
use s2o_kernels::params::LikeliestParams;
use s2o_kernels::{Dtype, Function, Kernel};

/// Chooses likeliest tokens on a GPU, so that the next forward pass can be enqueued before the host has read them. Dropping
/// it waits for the GPU.
#[derive(Debug)]
pub struct Likeliest {
    device: Device,
    stream: Arc<CudaStream>,
    /// The last choice: the token, and whether its logits are finite.
    host: PinnedHostSlice<u32>,
    /// The end of the copy to `host`. Its own event would be recorded only in some modes of its context.
    copied: CudaEvent,
}

impl Likeliest {
    /// Allocates the memory on the host to which choices on `device` are copied.
    ///
    /// # Errors
    /// If the device is not an NVIDIA GPU, or the driver fails.
    pub fn new(device: &Device) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        let new = || -> std::result::Result<_, DriverError> {
            // SAFETY: any bits are two numbers, and they are set next.
            let mut host = unsafe { stream.context().alloc_pinned_with_flags(2, 0) }?;
            host.as_mut_slice()?.fill(0);
            let copied = stream.context().new_event(None)?;
            Ok(Self { device: device.clone(), stream: Arc::clone(&stream), host, copied })
        };
        new().map_err(Error::wrap)
    }

    /// Enqueues the choice of the largest of contiguous f32 `logits` `(vocab_size,)`, of equal ones the first, and its
    /// copy to the host. Returns the token on the GPU, `(1, 1)`, u32; it is a place in `logits` in every case. The host
    /// does not wait.
    ///
    /// # Errors
    /// If the logits are others, none or on another device, or the driver fails.
    pub fn choose(&mut self, logits: &Tensor) -> Result<Tensor> {
        if logits.dtype() != DType::F32 || !logits.is_contiguous() || logits.rank() != 1 || logits.elem_count() == 0 {
            bail!("expected contiguous f32 logits of one position, got {:?} of {:?}", logits.dtype(), logits.layout())
        }
        if !logits.device().same_device(&self.device) {
            let [expected, got] = [&self.device, logits.device()].map(Device::location);
            bail!("expected logits on {expected:?}, got logits on {got:?}")
        }
        let out = self.enqueue(logits)?;
        out.narrow(0, 0, 1)?.reshape((1, 1))
    }

    fn enqueue(&mut self, logits: &Tensor) -> std::result::Result<Tensor, CudaError> {
        let launcher = Launcher::of(logits)?;
        let stream = launcher.stream();
        let shape = Shape::from(2);
        let mut out = launcher.uninit::<u32>(&shape)?;
        {
            let (storage, layout) = logits.storage_and_layout();
            let (logits, _logits) = unaligned_address::<f32>(&storage, layout, stream)?;
            let (out, _out) = out.device_ptr_mut(stream);
            let params = LikeliestParams {
                logits: logits as *const f32,
                out: out as *mut u32,
                size: layout.shape().elem_count() as i64,
            };
            let function = Function::new(Kernel::Likeliest, Dtype::Bf16, ANY_HEAD_DIM);
            // SAFETY: one block for contiguous logits; both tensors are held until the launch is enqueued.
            unsafe { launcher.launch(function, &params, Grid::Blocks([1, 1, 1])) }?;
        }
        stream.memcpy_dtoh(&out, &mut self.host).map_err(Error::wrap)?;
        self.copied.record(stream).map_err(Error::wrap)?;
        Ok(launcher.tensor(out, shape))
    }

    /// The last choice, or `None` if one of its logits is NaN or infinite. The host waits for it, but not for work that was
    /// enqueued after it.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read(&self) -> Result<Option<u32>> {
        self.copied.synchronize().map_err(Error::wrap)?;
        let choice = self.host.as_slice().map_err(Error::wrap)?;
        Ok((choice[1] == 1).then_some(choice[0]))
    }
}

impl Drop for Likeliest {
    fn drop(&mut self) {
        // A copy to `host` may still run, or a pass that was enqueued ahead, with memory that another thread uses next. After an
        // error of the driver nothing runs any more.
        let _ = self.stream.synchronize();
    }
}
