//! Dense attention and S2O on an NVIDIA GPU, in bf16, against candle-flash-attn and PyTorch's cuDNN attention, on the
//! tensors of a trained model and on random tensors (near-uniform attention: the worst case).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
#[cfg(feature = "flash-attn")]
use candle_core::DType;
use candle_core::Tensor;
use candle_s2o::{Mask, S2oConfig, dense_attn, s2o_attn, s2o_attn_with_stats};
use clap::Args;
use half::bf16;
use s2o_eval::capture::LayerTensors;

use crate::measure::gpu::Gpu;
use crate::measure::{Machine, Place, Row, agree, causal_tflop, relative_error};
use crate::tensors::stacked;

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

impl Source {
    fn tensors(self, tokens: usize, gpu: &Gpu) -> Result<LayerTensors> {
        match self {
            Self::Trained => stacked(tokens, &gpu.device),
            Self::Random => gpu.random(tokens, 32, 8),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Trained => "needle-7m layers",
            Self::Random => "random",
        }
    }
}

fn dense(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors) -> Result<Tensor> {
    Ok(dense_attn(q, k, v, *softmax_scale, Mask::Causal)?)
}

fn s2o(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors, config: &S2oConfig) -> Result<Tensor> {
    Ok(s2o_attn(q, k, v, *softmax_scale, config)?)
}

#[cfg(feature = "flash-attn")]
fn flash(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors) -> Result<Option<Tensor>> {
    Ok(Some(candle_flash_attn::flash_attn(q, k, v, *softmax_scale, true)?))
}

#[cfg(not(feature = "flash-attn"))]
fn flash(_: &LayerTensors) -> Result<Option<Tensor>> {
    Ok(None)
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
                let rows = compare(&gpu, &machine, source, &source.tensors(tokens, &gpu)?, arguments, repeats)?;
                machine.append(&rows, place)?;
            }
        }
    }
    Ok(())
}

struct Method {
    name: String,
    config: S2oConfig,
    density: f64,
    error: f64,
}

fn compare(
    gpu: &Gpu,
    machine: &Machine,
    source: Source,
    tensors: &LayerTensors,
    arguments: &GpuArguments,
    repeats: usize,
) -> Result<Vec<Row>> {
    let LayerTensors { q, k, v, softmax_scale, .. } = tensors;
    let (tokens, from) = (q.dim(1)?, source.name());
    let exact = dense(tensors)?;
    if let Some(flash) = flash(tensors)? {
        agree("our dense against candle-flash-attn", &exact, &flash, 1e-2)?;
    }
    let never_stops = S2oConfig::builder().tau(0.0).build()?;
    agree("S2O that never stops", &s2o(tensors, &never_stops)?, &exact, 1e-2)?;

    let mut configs = vec![("default".to_owned(), S2oConfig::default()), ("paper".to_owned(), S2oConfig::paper())];
    for &tau in &arguments.tau {
        configs.push((format!("tau {tau}"), S2oConfig::builder().tau(tau).build()?));
    }
    let mut methods = Vec::new();
    for (name, config) in configs {
        let (out, stats) = s2o_attn_with_stats(q, k, v, *softmax_scale, &config)?;
        // With near-uniform attention the skipped keys matter as much as the others, so only NaN is an error.
        let error = relative_error(&out, &exact)?;
        let most = if source == Source::Trained { 0.5 } else { f64::MAX };
        ensure!(error <= most, "{name}: relative error {error}: not timed");
        println!("{tokens:7} {from:17} {name:10} density {:.4} relative error {error:.4}", stats.density());
        methods.push(Method { name, config, density: stats.density(), error });
    }
    drop(exact);

    let cudnn_ms = arguments.torch.as_deref().map(|python| cudnn_ms(python, tensors, repeats)).transpose()?;
    let mut run_flash = || flash(tensors).map(drop);
    let mut run_dense = || dense(tensors).map(drop);
    let mut sparse: Vec<_> = methods.iter().map(|method| || s2o(tensors, &method.config).map(drop)).collect();
    let mut contestants: Vec<&mut dyn FnMut() -> Result<()>> = vec![&mut run_flash, &mut run_dense];
    contestants.extend(sparse.iter_mut().map(|run| run as &mut dyn FnMut() -> Result<()>));
    let medians = gpu.medians(repeats, &mut contestants)?;

    let flash_ms = cfg!(feature = "flash-attn").then_some(medians[0]);
    let baselines = [("candle-flash-attn 0.11.1", flash_ms), ("PyTorch SDPA, cuDNN", cudnn_ms)];
    for (name, ms) in &baselines {
        if let Some(ms) = ms {
            println!("{tokens:7} {from:17} {name:24} {ms:9.3} ms");
        }
    }
    let exact = Method { name: "dense".into(), config: S2oConfig::default(), density: 1.0, error: 0.0 };
    let tflop = causal_tflop(q, k)?;
    let mut rows = Vec::new();
    for (method, &ms) in std::iter::once(&exact).chain(&methods).zip(&medians[1..]) {
        let tflops = method.density * tflop / ms * 1e3;
        print!("{tokens:7} {from:17} {:10} {ms:9.3} ms  {tflops:6.1} TF/s of what is computed", method.name);
        let is_dense = std::ptr::eq(method, &exact);
        for (baseline, baseline_ms) in baselines {
            let Some(baseline_ms) = baseline_ms else { continue };
            print!("  x{:.2} {baseline}", baseline_ms / ms);
            let row = Row {
                segment: if is_dense { String::new() } else { method.config.segment_len().resolve(tokens).to_string() },
                tau: (!is_dense).then(|| method.config.tau().resolve(tokens)),
                density: Some(method.density),
                error: (!is_dense).then_some(method.error),
                tflops: Some(tflops),
                ..machine.row("attention gpu", &format!("{}, {from}", method.name), q, k)?
            };
            rows.push(row.against(baseline, ms, baseline_ms));
        }
        println!();
    }
    Ok(rows)
}

/// Median milliseconds of causal attention on bf16 tensors by PyTorch's cuDNN attention, in a separate process on the
/// same GPU.
fn cudnn_ms(python: &Path, tensors: &LayerTensors, repeats: usize) -> Result<f64> {
    let LayerTensors { q, k, v, softmax_scale, .. } = tensors;
    let directory = tempfile::tempdir_in(if PathBuf::from("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })?;
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        let values = tensor.flatten_all()?.to_vec1::<bf16>()?;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_bits().to_ne_bytes()).collect();
        fs::write(directory.path().join(name), bytes)?;
    }
    let (_, len, heads, head_dim) = q.dims4()?;
    let output = Command::new(python)
        .arg("-c")
        .arg(include_str!("sdpa.py"))
        .arg(directory.path())
        .args([len, heads, k.dim(2)?, head_dim, repeats].map(|n| n.to_string()))
        .args([softmax_scale.to_string(), "1".to_owned()])
        .output()
        .with_context(|| format!("running {}", python.display()))?;
    ensure!(output.status.success(), "PyTorch: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}
