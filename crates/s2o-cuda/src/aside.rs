//! Kernels that run next to those of a launcher: they fill the multiprocessors that the last blocks of a launch leave
//! idle.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::{CudaError, Doing};
use crate::launcher::Launcher;
use crate::library::OTHER_STREAMS;
use crate::memory::is_capturing;

/// A launcher on another stream of a GPU. Its work begins after the work that was enqueued before
/// [`Launcher::aside`], and ends before the work that is enqueued after [`Aside::join`] or the drop. In between, the two
/// launchers must not write the same memory. Scratch memory of this launcher is allocated and released on its stream.
#[derive(Debug)]
pub struct Aside {
    launcher: Launcher,
    /// The first stream, until it has joined.
    first: Option<Arc<CudaStream>>,
}

impl Launcher {
    /// Begins work on the `i`-th other stream of the GPU, next to this launcher's. A launcher that times its kernels runs them
    /// one after the other. So does one whose stream captures a graph: the other streams are those of all threads, and would
    /// take part in the capture.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If `i` is not below [`Aside::STREAMS`].
    pub fn aside(&self, i: usize) -> Result<Aside, CudaError> {
        if self.is_timed() || is_capturing(self.stream())? {
            return Ok(Aside { launcher: self.clone(), first: None });
        }
        let launcher = self.on_other_stream(i);
        follow(launcher.stream(), self.stream())?;
        Ok(Aside { launcher, first: Some(Arc::clone(self.stream())) })
    }
}

impl Aside {
    /// Other streams of a GPU.
    pub const STREAMS: usize = OTHER_STREAMS;

    /// The launcher of this work.
    pub fn launcher(&self) -> &Launcher {
        &self.launcher
    }

    /// Later work of the first launcher begins after this work.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn join(mut self) -> Result<(), CudaError> {
        self.end()
    }

    /// If the other work cannot be ordered, the host waits for it, because its memory may be released next.
    fn end(&mut self) -> Result<(), CudaError> {
        let Some(first) = self.first.take() else { return Ok(()) };
        let stream = self.launcher.stream();
        follow(&first, stream).inspect_err(|_| {
            let _ = stream.synchronize();
        })
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // After another error; the context would report a second one with its next check.
        let _ = self.end();
    }
}

/// Work enqueued on `later` from now on begins after the work on `earlier`.
fn follow(later: &CudaStream, earlier: &CudaStream) -> Result<(), CudaError> {
    let reached = earlier.record_event(None).doing("recording an event")?;
    later.wait(&reached).doing("waiting for another stream")
}
