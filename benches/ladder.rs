//! The paper's ladder on an NVIDIA GPU: what each step from dense attention to S2O costs, and what the ranking costs.
//!
//! A dense; B the prefix gathered in natural order; C in ranked order; D as C with the stop asked for and never true.
//! B to D are the attention kernel alone, each in turns with A, on random tensors in bf16, 32 query and 8 KV heads, S 2048.
//!
//! ```text
//! cargo bench --bench ladder --features cuda
//! ```

#[allow(dead_code, reason = "shared with the other benchmarks")]
mod measure;

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_s2o::cuda::KernelTime;
use candle_s2o::{Permutation, Ranking, S2oConfig, S2oOp, SegmentLen, SegmentOrder, dense_attn};
use clap::Parser;
use measure::gpu::Gpu;
use measure::{Machine, Place, Row, agree, causal_tflop, median};

const NUM_HEADS: usize = 32;
const NUM_KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;

/// Times the ladder and the ranking, and appends to benches/record/.
#[derive(Debug, Parser)]
struct Arguments {
    /// Prompt lengths in tokens of the ladder.
    #[arg(long, value_delimiter = ',', default_value = "8192,32768,65536,131072")]
    tokens: Vec<usize>,
    /// Prompt lengths in tokens of the ranking.
    #[arg(long, value_delimiter = ',', default_value = "4096,8192,16384,32768,65536,131072")]
    ranking_tokens: Vec<usize>,
    /// Segment lengths of the ranking.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048,4096")]
    segments: Vec<usize>,
    /// Timed runs.
    #[arg(long, default_value = "5")]
    repeats: usize,
    #[command(flatten)]
    place: Place,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let gpu = Gpu::new()?;
    let machine = gpu.machine()?;
    println!("{}", machine.device());
    for &tokens in &arguments.tokens {
        let problem = Problem::random(&gpu, tokens)?;
        machine.append(&ladder(&gpu, &machine, &problem, arguments.repeats)?, &arguments.place)?;
    }
    for &tokens in &arguments.ranking_tokens {
        let problem = Problem::random(&gpu, tokens)?;
        let mut rows = Vec::new();
        for &segment_len in arguments.segments.iter().filter(|&&len| len < tokens) {
            rows.push(ranking(&machine, &problem, segment_len, arguments.repeats)?);
        }
        machine.append(&rows, &arguments.place)?;
    }
    Ok(())
}

struct Problem {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: f32,
}

impl Problem {
    fn random(gpu: &Gpu, tokens: usize) -> Result<Self> {
        let random = |heads| -> Result<Tensor> {
            Ok(Tensor::randn(0f32, 1.0, (1, tokens, heads, HEAD_DIM), &gpu.device)?.to_dtype(DType::BF16)?)
        };
        let (q, k, v) = (random(NUM_HEADS)?, random(NUM_KV_HEADS)?, random(NUM_KV_HEADS)?);
        Ok(Self { q, k, v, scale: (HEAD_DIM as f32).sqrt().recip() })
    }

    fn dense(&self) -> Result<Tensor> {
        Ok(dense_attn(&self.q, &self.k, &self.v, self.scale, true)?)
    }

    /// Time of the kernels that `counts` picks, all launches of a call together.
    fn timed(&self, op: &S2oOp, counts: fn(&KernelTime) -> bool) -> Result<(Tensor, f64)> {
        let (out, kernels) = op.clone().apply_timed(&self.q, &self.k, &self.v)?;
        Ok((out, kernels.iter().filter(|kernel| counts(kernel)).map(|kernel| kernel.ms).sum()))
    }
}

fn config(segment_len: usize, tau: f32) -> Result<S2oConfig> {
    let builder = S2oConfig::builder().segment_len(SegmentLen::Fixed(segment_len)).tau(tau);
    // All orders at once, so that each stage is one launch.
    Ok(builder.dense_tail(0).dense_below(0).workspace_cap(usize::MAX).build()?)
}

/// Orders that leave everything where it is.
fn natural(tokens: usize, segment_len: usize) -> Ranking {
    let orders: Vec<SegmentOrder> = (0..tokens)
        .step_by(segment_len)
        .map(|start| SegmentOrder {
            q_perm: Permutation::identity(segment_len.min(tokens - start)),
            kv_perm: Permutation::identity(start),
            tile_weights: Vec::new(),
        })
        .collect();
    vec![orders; NUM_HEADS]
}

fn ladder(gpu: &Gpu, machine: &Machine, problem: &Problem, repeats: usize) -> Result<Vec<Row>> {
    let (tokens, segment_len) = (problem.q.dim(1)?, 2048);
    let exact = problem.dense()?;
    let attends = |kernel: &KernelTime| kernel.kernel.starts_with("sparse");
    let never_asks = S2oOp::new(problem.scale, config(segment_len, 0.0)?);
    // Smaller than any gain can be.
    let never_true = S2oOp::new(problem.scale, config(segment_len, 1e-30)?);
    let steps = [
        ("B natural order gathered", never_asks.clone().with_ranking(natural(tokens, segment_len)), 0.0),
        ("C ranked order gathered", never_asks, 0.0),
        ("D stop asked, never true", never_true, 1e-30),
    ];
    let mut rows = Vec::new();
    for (method, op, tau) in steps {
        let (out, _) = problem.timed(&op, attends)?;
        agree(method, &out, &exact, 1e-2)?;
        let (mut times, mut dense_times) = (Vec::new(), Vec::new());
        for _ in 0..repeats {
            dense_times.push(gpu.time(&mut || problem.dense().map(drop))?);
            times.push(problem.timed(&op, attends)?.1);
        }
        let (ms, dense_ms) = (median(times), median(dense_times));
        let tflops = causal_tflop(&problem.q, &problem.k)? / ms * 1e3;
        println!("{tokens:7}  {method:26} {ms:9.3} ms  {tflops:6.1} TF/s, A {dense_ms:9.3} ms: x{:.3}", ms / dense_ms);
        rows.push(Row {
            segment: segment_len.to_string(),
            tau: Some(tau),
            density: Some(1.0),
            ms,
            tflops: Some(tflops),
            baseline: "A dense".into(),
            baseline_ms: Some(dense_ms),
            ratio: Some(dense_ms / ms),
            ..machine.row("ladder", method, &problem.q, &problem.k)?
        });
    }
    Ok(rows)
}

fn ranking(machine: &Machine, problem: &Problem, segment_len: usize, repeats: usize) -> Result<Row> {
    let ranks = |kernel: &KernelTime| matches!(kernel.kernel, "moments" | "scores" | "sort");
    let op = S2oOp::new(problem.scale, config(segment_len, S2oConfig::default().tau())?);
    problem.timed(&op, ranks)?;
    let times: Result<Vec<f64>> = (0..repeats).map(|_| Ok(problem.timed(&op, ranks)?.1)).collect();
    let ms = median(times?);
    ensure!(ms > 0.0, "no ranking kernel ran");
    let tokens = problem.q.dim(1)?;
    println!("{tokens:7}  ranking, S {segment_len:4}             {ms:9.3} ms");
    let segment = segment_len.to_string();
    Ok(Row { segment, ms, ..machine.row("ladder ranking", "ranking", &problem.q, &problem.k)? })
}
