//! [`SideStream`]: copies and messages that run next to the kernels of a device.

use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use crate::error::{CudaError, Doing};

/// A second stream of a device, of the highest priority: its work takes multiprocessors as soon as kernels leave them.
///
/// Memory is released in the order of the kernels' stream. Whoever enqueues work here holds its memory until the kernels
/// follow that work ([`Self::kernels_follow`]), or drops this value first, which waits for the work.
#[derive(Debug)]
pub struct SideStream {
    stream: Arc<CudaStream>,
    kernels: Arc<CudaStream>,
}

/// The end of the work on a [`SideStream`] that was enqueued before it.
#[derive(Debug)]
pub struct Mark(CudaEvent);

impl SideStream {
    /// A stream next to the stream of `device`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let kernels = device.cuda_stream();
        let context = kernels.context();
        context.bind_to_thread().doing("binding the context")?;
        let (_, highest) = result::stream::get_priority_range().doing("reading the priorities of streams")?;
        let stream = context.new_stream_with_priority(highest).doing("making a second stream")?;
        Ok(Self { stream, kernels })
    }

    /// The stream, bound to this thread. The caller's work follows the rules of [`Self`].
    ///
    /// # Errors
    /// If the driver fails.
    pub fn bound(&self) -> Result<sys::CUstream, CudaError> {
        self.stream.context().bind_to_thread().doing("binding the context")?;
        Ok(self.stream.cu_stream())
    }

    /// The stream of the kernels.
    pub fn kernels(&self) -> &CudaStream {
        &self.kernels
    }

    /// Later work begins after the kernels that are enqueued by now.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn follow_kernels(&self) -> Result<(), CudaError> {
        let reached = self.kernels.record_event(None).doing("recording an event")?;
        self.stream.wait(&reached).doing("waiting for kernels")
    }

    /// The end of the work that is enqueued by now.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn mark(&self) -> Result<Mark, CudaError> {
        self.stream.record_event(None).map(Mark).doing("recording an event")
    }

    /// Later kernels begin after `mark`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn kernels_follow(&self, mark: &Mark) -> Result<(), CudaError> {
        self.kernels.wait(&mark.0).doing("waiting for copies or messages")
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // After an error of the driver nothing runs any more.
        let _ = self.stream.synchronize();
    }
}
