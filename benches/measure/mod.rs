//! Paired timings, and the rows they leave in `benches/record/<device>/<date>.csv`.
//!
//! A time depends on the machine and its load. The ratio of two medians whose runs alternated in one process depends
//! much less on them. Every row with a baseline is such a pair, and every output is checked before it is timed.

#[cfg(feature = "cuda")]
pub mod gpu;

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use clap::Args;
pub use s2o_eval::metrics::median;
use s2o_eval::provenance::{Provenance, cpu};
use serde::Serialize;

#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub date: String,
    pub commit: String,
    pub device: String,
    pub driver: String,
    pub bench: String,
    pub method: String,
    pub q_len: usize,
    pub k_len: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: String,
    pub segment: String,
    pub tau: Option<f32>,
    pub density: Option<f64>,
    /// Distance from exact attention (from exact logits for whole prefills), relative in the Euclidean norm.
    pub error: Option<f64>,
    /// Mean of these distances over the heads, each relative to the norm of its own output.
    pub error_by_head: Option<f64>,
    pub ms: f64,
    pub tflops: Option<f64>,
    pub baseline: String,
    pub baseline_ms: Option<f64>,
    pub ratio: Option<f64>,
    pub command: String,
}

impl Row {
    /// The row with its time and that of the baseline that alternated with it.
    pub fn against(self, baseline: &str, ms: f64, baseline_ms: f64) -> Self {
        let (baseline, ratio) = (baseline.to_owned(), Some(baseline_ms / ms));
        Self { ms, baseline, baseline_ms: Some(baseline_ms), ratio, ..self }
    }
}

#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Directory of the records.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/record"))]
    pub record: PathBuf,
}

/// Provenance of the benchmark, the same in every row.
#[derive(Debug, Clone)]
pub struct Machine(Provenance);

impl Machine {
    /// This machine's CPU, with the number of Rayon's threads.
    pub fn here() -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
        let bench = std::env::current_exe().ok().and_then(|path| {
            let stem = path.file_stem()?.to_string_lossy().into_owned();
            Some(stem.rsplit_once('-').map_or(stem.clone(), |(name, _)| name.to_owned()))
        });
        let mut command = format!("cargo bench --bench {}", bench.unwrap_or_default());
        if !arguments.is_empty() {
            command = format!("{command} -- {}", arguments.join(" "));
        }
        Self(Provenance::here(cpu(), command))
    }

    /// The same machine, with the command of a program that is not a cargo benchmark.
    pub fn with_command(self, command: String) -> Self {
        Self(Provenance { command, ..self.0 })
    }

    /// The device, as rows name it.
    pub fn device(&self) -> &str {
        &self.0.device
    }

    /// A row about tensors `q` and `k`. The caller fills in the measurements.
    pub fn row(&self, bench: &str, method: &str, q: &Tensor, k: &Tensor) -> Result<Row> {
        let (_, q_len, heads, head_dim) = q.dims4()?;
        let (_, k_len, kv_heads, _) = k.dims4()?;
        Ok(self.row_of(bench, method, [q_len, k_len], [heads, kv_heads, head_dim], q.dtype()))
    }

    /// A row about lengths `[q_len, k_len]` and heads `[num_heads, num_kv_heads, head_dim]`.
    pub fn row_of(
        &self,
        bench: &str,
        method: &str,
        [q_len, k_len]: [usize; 2],
        [heads, kv_heads, head_dim]: [usize; 3],
        dtype: DType,
    ) -> Row {
        Row {
            date: self.0.date.clone(),
            commit: self.0.commit.clone(),
            device: self.0.device.clone(),
            driver: self.0.driver.clone(),
            bench: bench.to_owned(),
            method: method.to_owned(),
            q_len,
            k_len,
            heads,
            kv_heads,
            head_dim,
            dtype: dtype.as_str().to_owned(),
            segment: String::new(),
            tau: None,
            density: None,
            error: None,
            error_by_head: None,
            ms: f64::NAN,
            tflops: None,
            baseline: String::new(),
            baseline_ms: None,
            ratio: None,
            command: self.0.command.clone(),
        }
    }

    /// Appends rows to the record of this device and day.
    pub fn append(&self, rows: &[Row], place: &Place) -> Result<PathBuf> {
        let slug: String = self
            .device()
            .split(|c: char| !c.is_ascii_alphanumeric())
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("-")
            .to_lowercase();
        let path = place.record.join(slug);
        fs::create_dir_all(&path)?;
        let path = path.join(format!("{}.csv", self.0.date));
        let has_headers = !path.exists();
        let file = OpenOptions::new().create(true).append(true).open(&path).context("opening the record")?;
        let mut writer = csv::WriterBuilder::new().has_headers(has_headers).from_writer(file);
        for row in rows {
            writer.serialize(row)?;
        }
        writer.flush()?;
        Ok(path)
    }
}

/// Runs both, alternating, and returns the median milliseconds of each.
pub fn pair(
    repeats: usize,
    mut ours: impl FnMut() -> Result<()>,
    mut baseline: impl FnMut() -> Result<()>,
) -> Result<(f64, f64)> {
    let mut times = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        times.0.push(time(&mut ours)?);
        times.1.push(time(&mut baseline)?);
    }
    Ok((median(times.0), median(times.1)))
}

fn time(run: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Relative distances of two outputs in the Euclidean norm.
#[derive(Debug, Clone, Copy)]
pub struct Distance {
    /// Of all heads together: heads with large outputs count most.
    pub whole: f64,
    /// Mean over the heads.
    pub mean_of_heads: f64,
}

impl Distance {
    /// Between two (batch, len, heads, head_dim) tensors.
    pub fn between(got: &Tensor, want: &Tensor) -> Result<Self> {
        // In pieces, because wider copies of both would fill a GPU at long prompts.
        const ROWS: usize = 16 << 10;
        let (_, rows, heads, _) = got.dims4()?;
        let mut sums = vec![[0.0; 2]; heads];
        for first in (0..rows).step_by(ROWS) {
            let part = |t: &Tensor| t.narrow(1, first, ROWS.min(rows - first))?.to_dtype(DType::F32);
            let (got, want) = (part(got)?, part(want)?);
            for (i, squares) in [(got - &want)?.sqr()?, want.sqr()?].into_iter().enumerate() {
                let of_heads = squares.sum((0, 1, 3))?.to_vec1::<f32>()?;
                sums.iter_mut().zip(of_heads).for_each(|(sums, square)| sums[i] += f64::from(square));
            }
        }
        let relative = |[difference, norm]: [f64; 2]| (difference / norm).sqrt();
        let all = sums.iter().fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d]);
        let mean_of_heads = sums.iter().copied().map(relative).sum::<f64>() / heads as f64;
        Ok(Self { whole: relative(all), mean_of_heads })
    }
}

/// Relative distance of two (batch, len, heads, head_dim) tensors in the Euclidean norm.
pub fn relative_error(got: &Tensor, want: &Tensor) -> Result<f64> {
    Ok(Distance::between(got, want)?.whole)
}

/// Fails if two outputs differ by more than `tolerance`, see [`relative_error`].
pub fn agree(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) -> Result<()> {
    let error = relative_error(got, want)?;
    ensure!(error <= tolerance, "{what}: outputs differ by {error:e}, more than {tolerance:e}: not timed");
    Ok(())
}

/// 2 products of 2 `head_dim` FLOP for each visible (query, key) pair of causal attention, in units of 1e12.
pub fn causal_tflop(q: &Tensor, k: &Tensor) -> Result<f64> {
    let (batch, q_len, heads, head_dim) = q.dims4()?;
    let offset = k.dim(1)? - q_len;
    let pairs = (q_len * offset + q_len * (q_len + 1) / 2) as f64;
    Ok(4.0 * head_dim as f64 * pairs * (batch * heads) as f64 / 1e12)
}
