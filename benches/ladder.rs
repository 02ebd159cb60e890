//! The paper's ladder on an NVIDIA GPU: the cost of each step from dense attention to S2O, and of the ranking.
//!
//! A dense; B the prefix gathered in natural order; C gathered in ranked order; D as C with a stop rule that is
//! evaluated and never true. Without causality there is no window and no ranking: B gathers all keys in natural order,
//! C and D in a scattered order. Times only the attention kernels, each of B to D alternating with A, on random tensors
//! in bf16, 32 query and 8 KV heads, S 2048.
//!
//! ```text
//! cargo bench --bench ladder --features ladder
//! ```

#[allow(dead_code, reason = "shared with the other benchmarks")]
mod measure;

use anyhow::{Result, ensure};
use candle_core::Tensor;
use candle_s2o::cuda::{KernelTime, dense_attn_timed, gather_attn_timed};
use candle_s2o::{Mask, Permutation, Ranking, S2oConfig, S2oOp, SegmentLen, SegmentOrder, Tau};
use clap::Parser;
use measure::gpu::Gpu;
use measure::{Machine, Place, Row, agree, causal_tflop, median};
use s2o_eval::capture::LayerTensors;

const NUM_HEADS: usize = 32;
const NUM_KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
/// A threshold below any possible gain.
const NEVER: f32 = 1e-30;

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
    /// Minimum number of timed runs; short runs are repeated for half a second, or 41 times.
    #[arg(long, default_value = "5")]
    repeats: usize,
    #[command(flatten)]
    place: Place,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let gpu = Gpu::new()?;
    let machine = gpu.machine()?;
    println!("{}", machine.device());
    for &tokens in &arguments.tokens {
        let tensors = gpu.random(tokens, NUM_HEADS, NUM_KV_HEADS)?;
        for ladder in [causal_ladder, full_ladder] {
            machine.append(&ladder(&machine, &tensors, arguments.repeats)?, &arguments.place)?;
        }
    }
    for &tokens in &arguments.ranking_tokens {
        let tensors = gpu.random(tokens, NUM_HEADS, NUM_KV_HEADS)?;
        let mut rows = Vec::new();
        for &segment_len in arguments.segments.iter().filter(|&&len| len < tokens) {
            rows.push(ranking(&machine, &tensors, segment_len, arguments.repeats)?);
        }
        machine.append(&rows, &arguments.place)?;
    }
    Ok(())
}

/// Dense attention and the time of its kernel.
fn dense(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors, mask: Mask) -> Result<Timed> {
    total(dense_attn_timed(q, k, v, *softmax_scale, mask)?, |_| true)
}

/// S2O and the time of the kernels that `counts` selects.
fn s2o(tensors: &LayerTensors, op: &S2oOp, counts: fn(&KernelTime) -> bool) -> Result<Timed> {
    total(op.clone().apply_timed(&tensors.q, &tensors.k, &tensors.v)?, counts)
}

/// Attention to all keys in the orders of the heads, and the time of its kernel.
fn gather(tensors: &LayerTensors, orders: &[Permutation], tau: f32) -> Result<Timed> {
    let LayerTensors { q, k, v, softmax_scale, .. } = tensors;
    total(gather_attn_timed(q, k, v, *softmax_scale, orders, tau)?, |_| true)
}

/// An output and its time in milliseconds.
type Timed = (Tensor, f64);

/// The output and the total time of the launches that `counts` selects.
fn total((out, kernels): (Tensor, Vec<KernelTime>), counts: fn(&KernelTime) -> bool) -> Result<Timed> {
    Ok((out, kernels.iter().filter(|kernel| counts(kernel)).map(|kernel| kernel.ms).sum()))
}

fn config(segment_len: usize, tau: impl Into<Tau>) -> Result<S2oConfig> {
    let builder = S2oConfig::builder().segment_len(SegmentLen::Fixed(segment_len)).tau(tau);
    // All orders at once, so that each stage is one launch.
    Ok(builder.dense_tail(0).dense_below(0).workspace_cap(usize::MAX).build()?)
}

/// Orders that leave all keys and queries in place.
fn natural(tokens: usize, segment_len: usize) -> Ranking {
    let orders: Vec<SegmentOrder> = (0..tokens)
        .step_by(segment_len)
        .map(|start| SegmentOrder {
            q_perm: Permutation::identity(segment_len.min(tokens - start)),
            kv_perm: Permutation::identity(start),
        })
        .collect();
    vec![orders; NUM_HEADS]
}

/// A step of the ladder: its name, its threshold and its function.
type Step<'a> = (&'static str, f32, Box<dyn Fn() -> Result<Timed> + 'a>);

fn causal_ladder(machine: &Machine, tensors: &LayerTensors, repeats: usize) -> Result<Vec<Row>> {
    let (tokens, segment_len) = (tensors.q.dim(1)?, 2048);
    let attends = |kernel: &KernelTime| kernel.kernel.starts_with("single_pass");
    let never_asks = S2oOp::new(tensors.softmax_scale, config(segment_len, 0.0)?);
    let never_true = S2oOp::new(tensors.softmax_scale, config(segment_len, NEVER)?);
    let natural = never_asks.clone().with_ranking(natural(tokens, segment_len));
    let steps: [Step<'_>; 3] = [
        ("B natural order gathered", 0.0, Box::new(move || s2o(tensors, &natural, attends))),
        ("C ranked order gathered", 0.0, Box::new(move || s2o(tensors, &never_asks, attends))),
        ("D stop asked, never true", NEVER, Box::new(move || s2o(tensors, &never_true, attends))),
    ];
    let tflop = causal_tflop(&tensors.q, &tensors.k)?;
    climb(machine, tensors, "A dense", || dense(tensors, Mask::Causal), steps, tflop, repeats)
}

fn full_ladder(machine: &Machine, tensors: &LayerTensors, repeats: usize) -> Result<Vec<Row>> {
    let tokens = tensors.q.dim(1)?;
    let natural: Vec<Permutation> = (0..NUM_HEADS).map(|_| Permutation::identity(tokens)).collect();
    let scattered: Result<Vec<Permutation>, _> = (0..NUM_HEADS as u64)
        // Neighbours end up far apart. This is a permutation unless 7919 divides the length.
        .map(|head| {
            Permutation::new((0..tokens as u64).map(|i| ((i * 7919 + head * 911) % tokens as u64) as u32).collect())
        })
        .collect();
    let scattered = &scattered?;
    let steps: [Step<'_>; 3] = [
        ("B natural order gathered, not causal", 0.0, Box::new(move || gather(tensors, &natural, 0.0))),
        ("C scattered order gathered, not causal", 0.0, Box::new(move || gather(tensors, scattered, 0.0))),
        ("D stop asked, never true, not causal", NEVER, Box::new(move || gather(tensors, scattered, NEVER))),
    ];
    let tflop = 4e-12 * (tokens * tokens * NUM_HEADS * HEAD_DIM) as f64;
    climb(machine, tensors, "A dense, not causal", || dense(tensors, Mask::Full), steps, tflop, repeats)
}

/// Checks each step against dense attention, then times it alternating with dense attention.
fn climb(
    machine: &Machine,
    tensors: &LayerTensors,
    baseline: &'static str,
    dense: impl Fn() -> Result<Timed>,
    steps: [Step<'_>; 3],
    tflop: f64,
    repeats: usize,
) -> Result<Vec<Row>> {
    let tokens = tensors.q.dim(1)?;
    let (exact, _) = dense()?;
    let mut rows = Vec::new();
    for (method, tau, step) in steps {
        let (out, first_ms) = step()?;
        agree(method, &out, &exact, 1e-2)?;
        let repeats = repeats.max((500.0 / first_ms).ceil().min(41.0) as usize);
        let (mut times, mut dense_times) = (Vec::new(), Vec::new());
        for _ in 0..repeats {
            dense_times.push(dense()?.1);
            times.push(step()?.1);
        }
        let (ms, dense_ms) = (median(times), median(dense_times));
        let tflops = tflop / ms * 1e3;
        println!(
            "{tokens:7}  {method:38} {ms:9.3} ms  {tflops:6.1} TF/s, {baseline} {dense_ms:9.3} ms: x{:.3}",
            ms / dense_ms
        );
        let row = machine.row("ladder", method, &tensors.q, &tensors.k)?;
        let (segment, density, tflops) = ("2048".to_owned(), Some(1.0), Some(tflops));
        rows.push(Row { segment, tau: Some(tau), density, tflops, ..row }.against(baseline, ms, dense_ms));
    }
    Ok(rows)
}

fn ranking(machine: &Machine, tensors: &LayerTensors, segment_len: usize, repeats: usize) -> Result<Row> {
    let ranks = |kernel: &KernelTime| matches!(kernel.kernel, "moments" | "scores" | "sort");
    let op = S2oOp::new(tensors.softmax_scale, config(segment_len, Tau::Auto)?);
    s2o(tensors, &op, ranks)?;
    let times: Result<Vec<f64>> = (0..repeats).map(|_| Ok(s2o(tensors, &op, ranks)?.1)).collect();
    let ms = median(times?);
    ensure!(ms > 0.0, "no ranking kernel ran");
    let tokens = tensors.q.dim(1)?;
    println!("{tokens:7}  ranking, S {segment_len:4}             {ms:9.3} ms");
    let segment = segment_len.to_string();
    Ok(Row { segment, ms, ..machine.row("ladder ranking", "ranking", &tensors.q, &tensors.k)? })
}
