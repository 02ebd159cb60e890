//! Dense attention and S2O on an NVIDIA GPU, in bf16, against candle-flash-attn and PyTorch's cuDNN attention, on the
//! tensors of a trained model and on random tensors (near-uniform attention: the worst case).

use std::path::PathBuf;

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_s2o::{Mask, S2oConfig, dense_attn, s2o_attn, s2o_attn_with_stats};
use clap::Args;

use crate::measure::gpu::Gpu;
use crate::measure::{Machine, Place, Row, agree, causal_tflop, relative_error};
use crate::tensors::stacked;
use crate::torch::Torch;

/// Default prompt lengths in units of 1024 tokens.
const LENGTHS: [usize; 6] = [8, 32, 64, 128, 256, 512];
/// Context of the trained model in tokens.
const LONGEST_TRAINED: usize = 128 << 10;

/// Options of `gpu`.
#[derive(Debug, Args)]
pub struct GpuArguments {
    /// Thresholds in addition to the default.
    #[arg(long, value_delimiter = ',', default_value = "0.05")]
    tau: Vec<f32>,
    /// Python with PyTorch, for the cuDNN baseline.
    #[arg(long)]
    torch: Option<PathBuf>,
    /// Use only random or only trained tensors.
    #[arg(long)]
    tensors: Option<Source>,
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum Source {
    /// All layers of needle-7m on a passkey prompt, stacked to 24 query and 12 KV heads.
    Trained,
    /// Normal random values, 32 query and 8 KV heads.
    Random,
}

/// Queries, keys and values of one comparison.
struct Problem {
    source: Source,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: f32,
}

impl Problem {
    fn new(source: Source, tokens: usize, gpu: &Gpu) -> Result<Self> {
        match source {
            Source::Trained => {
                let ([q, k, v], scale) = stacked(tokens, &gpu.device)?;
                Ok(Self { source, q, k, v, scale })
            }
            Source::Random => {
                let random = |heads| -> Result<Tensor> {
                    Ok(Tensor::randn(0f32, 1.0, (1, tokens, heads, 128), &gpu.device)?.to_dtype(DType::BF16)?)
                };
                Ok(Self { source, q: random(32)?, k: random(8)?, v: random(8)?, scale: 128f32.sqrt().recip() })
            }
        }
    }

    fn name(&self) -> &'static str {
        match self.source {
            Source::Trained => "needle-7m layers",
            Source::Random => "random",
        }
    }

    fn dense(&self) -> Result<Tensor> {
        Ok(dense_attn(&self.q, &self.k, &self.v, self.scale, Mask::Causal)?)
    }

    fn s2o(&self, config: &S2oConfig) -> Result<Tensor> {
        Ok(s2o_attn(&self.q, &self.k, &self.v, self.scale, config)?)
    }

    #[cfg(feature = "flash-attn")]
    fn flash(&self) -> Result<Option<Tensor>> {
        Ok(Some(candle_flash_attn::flash_attn(&self.q, &self.k, &self.v, self.scale, true)?))
    }

    #[cfg(not(feature = "flash-attn"))]
    fn flash(&self) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

/// The error of our dense attention against f64 must be at most twice that of candle-flash-attn on the same tensors.
#[cfg(feature = "flash-attn")]
fn check_accuracy(gpu: &Gpu) -> Result<()> {
    let (q_len, k_len, heads, kv_heads, dim) = (300, 1500, 4, 2, 128);
    let random = |len, heads| -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1.5, (1, len, heads, dim), &gpu.device)?.to_dtype(DType::BF16)?)
    };
    let (q, k, v) = (random(q_len, heads)?, random(k_len, kv_heads)?, random(k_len, kv_heads)?);
    let scale = (dim as f32).sqrt().recip();
    let host = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
    let (q_host, k_host, v_host) = (host(&q)?, host(&k)?, host(&v)?);
    let shape = s2o_core::AttnShape::of([1, q_len, heads, dim], [1, k_len, kv_heads, dim], [1, k_len, kv_heads, dim])?;
    let exact: Vec<Vec<f64>> = (0..heads)
        .map(|h| {
            let head = s2o_core::reference::Head::new(&shape, [&q_host, &k_host, &v_host], scale, 0, h);
            s2o_core::reference::dense(&head, 0..q_len)
        })
        .collect();
    let error = |out: &Tensor| -> Result<f64> {
        let (mut difference, mut norm) = (0.0, 0.0);
        for (i, got) in host(out)?.into_iter().enumerate() {
            let (row, head, d) = (i / dim / heads, i / dim % heads, i % dim);
            let want = exact[head][row * dim + d];
            difference += (f64::from(got) - want).powi(2);
            norm += want.powi(2);
        }
        Ok((difference / norm).sqrt())
    };
    let ours = error(&dense_attn(&q, &k, &v, scale, Mask::Causal)?)?;
    let flash = error(&candle_flash_attn::flash_attn(&q, &k, &v, scale, true)?)?;
    println!("dense, relative error against f64: ours {ours:.2e}, candle-flash-attn {flash:.2e}");
    ensure!(ours <= 2.0 * flash, "our dense attention is less exact than candle-flash-attn");
    Ok(())
}

/// Times every length and appends the rows.
pub fn run(arguments: &GpuArguments, tokens: &[usize], repeats: usize, place: &Place) -> Result<()> {
    let gpu = Gpu::new()?;
    let machine = gpu.machine()?;
    println!("{}", machine.device());
    #[cfg(feature = "flash-attn")]
    check_accuracy(&gpu)?;
    let lengths = if tokens.is_empty() { LENGTHS.map(|k| k << 10).to_vec() } else { tokens.to_vec() };
    for tokens in lengths {
        for source in [Source::Trained, Source::Random] {
            let exists = source == Source::Random || tokens <= LONGEST_TRAINED;
            if exists && arguments.tensors.is_none_or(|only| only == source) {
                let rows = compare(&gpu, &machine, &Problem::new(source, tokens, &gpu)?, arguments, repeats)?;
                machine.append(&rows, place)?;
            }
        }
    }
    Ok(())
}

/// A configuration of S2O.
struct Method {
    name: String,
    config: S2oConfig,
    density: f64,
    error: f64,
}

fn compare(
    gpu: &Gpu,
    machine: &Machine,
    problem: &Problem,
    arguments: &GpuArguments,
    repeats: usize,
) -> Result<Vec<Row>> {
    let tokens = problem.q.dim(1)?;
    let exact = problem.dense()?;
    if let Some(flash) = problem.flash()? {
        agree("our dense against candle-flash-attn", &exact, &flash, 1e-2)?;
    }
    let never_stops = S2oConfig::builder().tau(0.0).build()?;
    agree("S2O that never stops", &problem.s2o(&never_stops)?, &exact, 1e-2)?;

    let mut configs = vec![("default".to_owned(), S2oConfig::default()), ("paper".to_owned(), S2oConfig::paper())];
    for &tau in &arguments.tau {
        configs.push((format!("tau {tau}"), S2oConfig::builder().tau(tau).build()?));
    }
    let mut methods = Vec::new();
    for (name, config) in configs {
        let (out, stats) = s2o_attn_with_stats(&problem.q, &problem.k, &problem.v, problem.scale, &config)?;
        // With near-uniform attention the skipped keys matter as much as the others, so only NaN is an error.
        let error = relative_error(&out, &exact)?;
        let most = if problem.source == Source::Trained { 0.5 } else { f64::MAX };
        ensure!(error <= most, "{name}: relative error {error}: not timed");
        println!("{tokens:7} {:17} {name:10} density {:.4} relative error {error:.4}", problem.name(), stats.density());
        methods.push(Method { name, config, density: stats.density(), error });
    }
    drop(exact);

    let cudnn_ms = match &arguments.torch {
        Some(python) => {
            let torch = Torch { python: python.clone() };
            Some(torch.cudnn_ms([&problem.q, &problem.k, &problem.v], problem.scale, true, repeats)?)
        }
        None => None,
    };
    let mut flash = || problem.flash().map(drop);
    let mut dense = || problem.dense().map(drop);
    let mut sparse: Vec<_> = methods.iter().map(|method| || problem.s2o(&method.config).map(drop)).collect();
    let mut contestants: Vec<&mut dyn FnMut() -> Result<()>> = vec![&mut flash, &mut dense];
    contestants.extend(sparse.iter_mut().map(|run| run as &mut dyn FnMut() -> Result<()>));
    let medians = gpu.medians(repeats, &mut contestants)?;

    let flash_ms = cfg!(feature = "flash-attn").then_some(medians[0]);
    let baselines = [("candle-flash-attn 0.11.1", flash_ms), ("PyTorch SDPA, cuDNN", cudnn_ms)];
    for (name, ms) in &baselines {
        if let Some(ms) = ms {
            println!("{tokens:7} {:17} {name:24} {ms:9.3} ms", problem.name());
        }
    }
    let dense = Method { name: "dense".into(), config: S2oConfig::default(), density: 1.0, error: 0.0 };
    let tflop = causal_tflop(&problem.q, &problem.k)?;
    let mut rows = Vec::new();
    for (method, &ms) in std::iter::once(&dense).chain(&methods).zip(&medians[1..]) {
        let tflops = method.density * tflop / ms * 1e3;
        print!(
            "{tokens:7} {:17} {:10} {ms:9.3} ms  {tflops:6.1} TF/s of what is computed",
            problem.name(),
            method.name
        );
        let is_dense = std::ptr::eq(method, &dense);
        for (baseline, baseline_ms) in baselines {
            let Some(baseline_ms) = baseline_ms else { continue };
            print!("  x{:.2} {baseline}", baseline_ms / ms);
            rows.push(Row {
                segment: if is_dense { String::new() } else { method.config.segment_len().resolve(tokens).to_string() },
                tau: (!is_dense).then(|| method.config.tau()),
                density: Some(method.density),
                error: (!is_dense).then_some(method.error),
                ms,
                tflops: Some(tflops),
                baseline: baseline.into(),
                baseline_ms: Some(baseline_ms),
                ratio: Some(baseline_ms / ms),
                ..machine.row(
                    "attention gpu",
                    &format!("{}, {}", method.name, problem.name()),
                    &problem.q,
                    &problem.k,
                )?
            });
        }
        println!();
    }
    Ok(rows)
}
