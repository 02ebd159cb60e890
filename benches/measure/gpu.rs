//! Timing on a GPU: events on Candle's own stream, contestants in turns, and PyTorch's attention on the same tensors.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle_core::{Device, Tensor};
use half::bf16;

use super::{Machine, median, output_of};

/// The first GPU.
#[derive(Debug)]
pub struct Gpu {
    pub device: Device,
    stream: Arc<CudaStream>,
}

impl Gpu {
    pub fn new() -> Result<Self> {
        let device = Device::new_cuda(0)?;
        let stream = device.as_cuda_device()?.cuda_stream();
        Ok(Self { device, stream })
    }

    /// The machine, as rows name it: by its GPU.
    pub fn machine(&self) -> Result<Machine> {
        let query = |what: &str| output_of("nvidia-smi", &[&format!("--query-gpu={what}"), "--format=csv,noheader"]);
        Ok(Machine { device: self.stream.context().name()?, driver: query("driver_version"), ..Machine::here() })
    }

    /// Milliseconds from before `run` to after it, on the GPU.
    pub fn time(&self, run: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let event = || self.stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let (begin, end) = (event()?, event()?);
        begin.record(&self.stream)?;
        run()?;
        end.record(&self.stream)?;
        Ok(f64::from(begin.elapsed_ms(&end)?))
    }

    /// Median milliseconds of each contestant; they take turns, after one round that does not count.
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

/// PyTorch with its cuDNN attention, in a process of its own on the same GPU.
#[derive(Debug, Clone)]
pub struct Torch {
    pub python: PathBuf,
}

impl Torch {
    /// Median milliseconds of causal or full attention on these bf16 tensors.
    pub fn cudnn_ms(&self, [q, k, v]: [&Tensor; 3], scale: f32, causal: bool, repeats: usize) -> Result<f64> {
        let directory = tempfile::tempdir_in(if PathBuf::from("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })?;
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            let values = tensor.flatten_all()?.to_vec1::<bf16>()?;
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_bits().to_ne_bytes()).collect();
            fs::write(directory.path().join(name), bytes)?;
        }
        let (_, len, heads, head_dim) = q.dims4()?;
        let output = Command::new(&self.python)
            .arg("-c")
            .arg(include_str!("sdpa.py"))
            .arg(directory.path())
            .args([len, heads, k.dim(2)?, head_dim, repeats].map(|n| n.to_string()))
            .args([scale.to_string(), u8::from(causal).to_string()])
            .output()
            .with_context(|| format!("running {}", self.python.display()))?;
        ensure!(output.status.success(), "PyTorch: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.trim().parse()?)
    }
}
