//! Several GPUs: one process each, of which the first prints and records.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use s2o_comm::{Group, Nccl, local};
use s2o_models::Parallel;
use s2o_models::parallel::Mode;

use crate::logits::apart;
use crate::measure::gpu::Gpu;

/// This process among those that run one decoder.
pub struct Ranks {
    group: Arc<Group>,
}

impl Ranks {
    /// Starts the other ranks, unless this is one of them, and joins all; `None` for one GPU.
    pub fn join(gpus: usize) -> Result<Option<Self>> {
        if gpus == 1 {
            return Ok(None);
        }
        let place = local::place()?.map_or_else(|| local::start(gpus), Ok)?;
        Ok(Some(Self { group: local::join(&place)? }))
    }

    pub fn gpu(&self) -> Result<Gpu> {
        Gpu::of_rank(self.group.rank())
    }

    /// The ranks, with heads of equal work by the file `tiles` of `s2o prefill --head-tiles`.
    pub fn parallel(&self, mode: Mode, tiles: Option<&Path>, gpu: &Gpu) -> Result<Parallel> {
        let parallel = Parallel::new(mode, Arc::new(Nccl::new(Arc::clone(&self.group), &gpu.device)?));
        let Some(path) = tiles else { return Ok(parallel) };
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Ok(parallel.balanced(serde_json::from_str(&text)?))
    }

    pub fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// Ends the work of this rank. An error ends all ranks.
    pub fn finish(&self, result: Result<()>) {
        match result {
            Ok(()) => local::wait(),
            Err(error) => local::fail(&self.group, error.as_ref(), &error.to_string()),
        }
    }
}

/// Returns when all ranks are here, so that none is timed while it waits for another's preparations.
pub fn meet(parallel: Option<&Parallel>) -> Result<()> {
    parallel.map_or(Ok(()), |parallel| Ok(parallel.comm().group().exchange(&[]).map(drop)?))
}

/// Runs this benchmark once for each number of GPUs, with logits compared to those of the first.
pub fn each(gpus: &[usize]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut arguments: Vec<String> = Vec::new();
    let mut given = std::env::args().skip(1);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--gpus" => drop(given.next()),
            other if other.starts_with("--gpus=") => {}
            _ => arguments.push(argument),
        }
    }
    for number in gpus {
        let mut command = Command::new(std::env::current_exe().context("finding this benchmark")?);
        command.args(&arguments).args(["--gpus", &number.to_string(), "--first-logits"]).arg(directory.path());
        let status = command.status().context("starting this benchmark")?;
        ensure!(status.success(), "--gpus {number}: {status}");
    }
    Ok(())
}

/// The difference of logits from those that the first run stored under this name; the first run stores them.
pub fn off_first(directory: &Path, name: &str, logits: &Tensor) -> Result<Option<(f64, bool)>> {
    let path: PathBuf = directory.join(format!("{name}.safetensors"));
    if path.exists() {
        let first = candle_core::safetensors::load(&path, logits.device())?;
        return Ok(Some(apart(logits, &first["logits"])?));
    }
    logits.save_safetensors("logits", &path)?;
    Ok(None)
}
