//! PyTorch's attention on the same tensors.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use half::bf16;

/// PyTorch with its cuDNN attention, in a separate process on the same GPU.
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
