//! Times the kernels of a call one by one.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, sys};
use s2o_kernels::Kernel;

use crate::error::{CudaError, Doing};

/// Time that the GPU spent in one kernel of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Name of the kernel, as in docs/kernels.md.
    pub kernel: &'static str,
    /// Time from its start to its end, in milliseconds.
    pub ms: f64,
}

impl KernelTime {
    /// Whether the kernel belongs to the ranking (Algorithm 1), not to attention.
    pub fn ranks(&self) -> bool {
        matches!(self.kernel, "moments" | "scores" | "sort" | "key_guide" | "query_order")
    }
}

/// Events around every launch of a call.
#[derive(Debug, Default)]
pub struct Stopwatch {
    laps: Mutex<Vec<(Kernel, CudaEvent, CudaEvent)>>,
}

impl Stopwatch {
    pub(crate) fn time(
        &self,
        kernel: Kernel,
        stream: &Arc<CudaStream>,
        launch: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let record = || stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).doing("recording an event");
        let begin = record()?;
        launch()?;
        let lap = (kernel, begin, record()?);
        self.laps.lock().unwrap_or_else(PoisonError::into_inner).push(lap);
        Ok(())
    }

    /// Waits for the GPU and reads the times, in the order of the launches.
    pub fn read(&self) -> Result<Vec<KernelTime>, CudaError> {
        let laps = self.laps.lock().unwrap_or_else(PoisonError::into_inner);
        laps.iter()
            .map(|(kernel, begin, end)| {
                let ms = begin.elapsed_ms(end).doing("reading a time")?;
                Ok(KernelTime { kernel: kernel.name(), ms: f64::from(ms) })
            })
            .collect()
    }
}
