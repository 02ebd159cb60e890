//! Timing on a GPU: events on Candle's own stream, with alternating contestants.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use s2o_eval::capture::LayerTensors;
use s2o_eval::provenance::{Provenance, first_line_of};

use super::{Machine, median};

/// The first GPU.
#[derive(Debug)]
pub struct Gpu {
    pub device: Device,
    stream: Arc<CudaStream>,
}

impl Gpu {
    pub fn new() -> Result<Self> {
        Self::of(Device::new_cuda(0)?)
    }

    /// The GPU of a rank.
    pub fn of_rank(rank: usize) -> Result<Self> {
        Self::of(s2o_models::gpu(rank)?)
    }

    fn of(device: Device) -> Result<Self> {
        let stream = device.as_cuda_device()?.cuda_stream();
        Ok(Self { device, stream })
    }

    /// The machine, named by its GPU in the rows.
    pub fn machine(&self) -> Result<Machine> {
        let driver = first_line_of("nvidia-smi", &["--query-gpu=driver_version", "--format=csv,noheader"]);
        Ok(Machine(Provenance { device: self.stream.context().name()?, driver, ..Machine::here().0 }))
    }

    /// Normal random values in bf16, (1, tokens, `num_heads` or `num_kv_heads`, 128).
    pub fn random(&self, tokens: usize, num_heads: usize, num_kv_heads: usize) -> Result<LayerTensors> {
        let random = |heads| -> Result<Tensor> {
            Ok(Tensor::randn(0f32, 1.0, (1, tokens, heads, 128), &self.device)?.to_dtype(DType::BF16)?)
        };
        let (q, k, v) = (random(num_heads)?, random(num_kv_heads)?, random(num_kv_heads)?);
        Ok(LayerTensors { layer: 0, q, k, v, softmax_scale: 128f32.sqrt().recip() })
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
    }

    /// An event after all work enqueued so far, for timing. The host does not wait.
    pub fn mark(&self) -> Result<CudaEvent> {
        Ok(self.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))?)
    }

    /// Whether all work enqueued so far is done.
    pub fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as the device.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => Ok(other.result().map(|()| true)?),
        }
    }

    /// GPU time of `run` in milliseconds.
    pub fn time(&self, run: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let begin = self.mark()?;
        run()?;
        Ok(f64::from(begin.elapsed_ms(&self.mark()?)?))
    }

    /// Median milliseconds of each contestant. They alternate, after one round that is not counted.
    pub fn medians(&self, repeats: usize, contestants: &mut [&mut dyn FnMut() -> Result<()>]) -> Result<Vec<f64>> {
        let mut times = vec![Vec::new(); contestants.len()];
        for round in 0..=repeats {
            for (contestant, times) in contestants.iter_mut().zip(&mut times) {
                let ms = self.time(*contestant)?;
                if round > 0 {
                    times.push(ms);
                }
            }
        }
        Ok(times.into_iter().map(median).collect())
    }
}
