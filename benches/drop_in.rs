//! The exact calls of the drop-in that no other benchmark times, on an NVIDIA GPU, against candle-flash-attn's own
//! kernels: windows, ALiBi, softcap, and sequences of different lengths in one call. Random tensors in bf16, 32 query
//! and 8 KV heads. And by the policy, on the layers of needle-7m: the last chunk of a long prompt over a paged cache, and
//! prompts with softcap and heads of 256, which hold a head of the model twice and so have its attention.
//!
//! ```text
//! cargo bench --bench drop_in --features cuda,flash-attn -- --head-dims 64,128 --against-head-dims 64,128
//! ```

#[allow(dead_code, reason = "shared with the other benchmarks")]
mod measure;
#[allow(dead_code, reason = "the layers are stacked here")]
#[path = "attention/tensors.rs"]
mod trained;

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use clap::Parser;
use measure::gpu::Gpu;
use measure::{Machine, Place, agree, relative_error};
use s2o_eval::capture::LayerTensors;
use s2o_flash_attn::s2o::{AttnStats, Policy, S2oConfig, collect_stats, set_policy, take_stats};
use s2o_flash_attn::{flash_attn, flash_attn_alibi_windowed_softcap, flash_attn_varlen_paged_windowed};

const NUM_HEADS: usize = 32;
const NUM_KV_HEADS: usize = 8;

/// Times the calls of the drop-in and appends to benches/record/.
#[derive(Debug, Parser)]
struct Arguments {
    /// Prompt lengths in tokens.
    #[arg(long, value_delimiter = ',', default_value = "2048,8192,32768")]
    tokens: Vec<usize>,
    /// Head sizes.
    #[arg(long, value_delimiter = ',', default_value = "64,96,128,160,192,224,256")]
    head_dims: Vec<usize>,
    /// Head sizes that are compared with candle-flash-attn, for a build of it with fewer kernels.
    #[arg(long, value_delimiter = ',', default_value = "64,96,128,160,192,224,256")]
    against_head_dims: Vec<usize>,
    /// Keys of the chunk over pages, a power of two; 0 leaves it out.
    #[arg(long, default_value = "131072")]
    paged: usize,
    /// Lengths of the prompts with softcap and heads of 256; 0 leaves them out.
    #[arg(long, value_delimiter = ',', default_value = "32768,131072")]
    prompts: Vec<usize>,
    /// Timed runs of each side.
    #[arg(long, default_value = "7")]
    repeats: usize,
    #[command(flatten)]
    place: Place,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A kind of call.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    left: Option<usize>,
    right: Option<usize>,
    softcap: f32,
    has_slopes: bool,
    /// 64 sequences of 128 to 4096 tokens, in one tensor.
    is_varlen: bool,
    /// A single query.
    is_token: bool,
}

const CAUSAL: Case = Case {
    name: "causal",
    left: None,
    right: Some(0),
    softcap: 0.0,
    has_slopes: false,
    is_varlen: false,
    is_token: false,
};
const CASES: [Case; 8] = [
    CAUSAL,
    Case { name: "full", right: None, ..CAUSAL },
    Case { name: "window 1024", left: Some(1023), ..CAUSAL },
    Case { name: "window 4096", left: Some(4095), ..CAUSAL },
    Case { name: "softcap 50", softcap: 50.0, ..CAUSAL },
    Case { name: "ALiBi", has_slopes: true, ..CAUSAL },
    Case { name: "64 sequences", is_varlen: true, ..CAUSAL },
    Case { name: "a new token", is_token: true, ..CAUSAL },
];

struct Tensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    ends: Tensor,
    longest: usize,
    scale: f32,
}

macro_rules! by {
    ($crate_name:ident, $case:expr, $tensors:expr) => {{
        let (Case { left, right, softcap, has_slopes, is_varlen, .. }, t) = ($case, $tensors);
        let slopes = has_slopes.then_some(&t.slopes);
        if is_varlen {
            let [q, k, v] = [&t.q, &t.k, &t.v].map(|x| x.squeeze(0));
            let out = $crate_name::flash_attn_varlen_windowed(
                &q?, &k?, &v?, &t.ends, &t.ends, t.longest, t.longest, t.scale, left, right,
            );
            out.and_then(|out| out.unsqueeze(0))
        } else {
            $crate_name::flash_attn_alibi_windowed_softcap(&t.q, &t.k, &t.v, slopes, t.scale, left, right, softcap)
        }
    }};
}

fn ours(case: Case, tensors: &Tensors) -> Result<Tensor> {
    Ok(by!(s2o_flash_attn, case, tensors)?)
}

#[cfg(feature = "flash-attn")]
fn original(case: Case, tensors: &Tensors) -> Result<Tensor> {
    Ok(by!(candle_flash_attn, case, tensors)?)
}

#[cfg(not(feature = "flash-attn"))]
fn original(_: Case, _: &Tensors) -> Result<Tensor> {
    anyhow::bail!("expected a build with the feature flash-attn; --against-head-dims 0 compares with nothing")
}

/// The lengths of 64 sequences, the same in every run: 128 to 4096 tokens, 2048 on average.
fn sequence_lengths() -> Vec<u32> {
    (0..64u32).map(|i| 128 + (i * 37 % 64) * 3968 / 63).collect()
}

fn tensors(case: Case, tokens: usize, head_dim: usize, gpu: &Gpu) -> Result<Tensors> {
    let lengths = if case.is_varlen { sequence_lengths() } else { vec![tokens as u32] };
    let longest = lengths.iter().copied().max().unwrap_or_default() as usize;
    let mut ends = vec![0u32];
    lengths.iter().for_each(|len| ends.push(ends[ends.len() - 1] + len));
    let rows = ends[lengths.len()] as usize;
    let random = |rows, heads| -> Result<Tensor> {
        Ok(Tensor::randn(0f32, 1.0, (1, rows, heads, head_dim), &gpu.device)?.to_dtype(DType::BF16)?)
    };
    let slopes: Vec<f32> = (1..=NUM_HEADS).map(|head| (-8.0 * head as f32 / NUM_HEADS as f32).exp2()).collect();
    Ok(Tensors {
        q: random(if case.is_token { 1 } else { rows }, NUM_HEADS)?,
        k: random(rows, NUM_KV_HEADS)?,
        v: random(rows, NUM_KV_HEADS)?,
        slopes: Tensor::new(slopes, &gpu.device)?,
        ends: Tensor::new(ends, &gpu.device)?,
        longest,
        scale: (head_dim as f32).sqrt().recip(),
    })
}

/// The last 4096 tokens of a prompt over a paged cache, by the default policy and exactly. The original's exact call has
/// the same keys without pages.
fn paged(tokens: usize, arguments: &Arguments, gpu: &Gpu, machine: &Machine) -> Result<()> {
    const CHUNK: usize = 4096;
    const PAGE_LEN: usize = 32;
    ensure!(tokens.is_power_of_two() && tokens > CHUNK, "--paged: expected a power of two above {CHUNK}, got {tokens}");
    let layers = trained::stacked(tokens, &gpu.device)?;
    let scale = layers.softmax_scale;
    let q = layers.q.narrow(1, tokens - CHUNK, CHUNK)?.contiguous()?;
    let (_, _, num_kv_heads, head_dim) = layers.k.dims4()?;
    let num_pages = tokens / PAGE_LEN;
    // An odd factor modulo a power of two visits every page once.
    let table: Vec<u32> = (0..num_pages).map(|page| ((page * 2731 + 5) % num_pages) as u32).collect();
    let mut places = vec![0u32; num_pages];
    table.iter().enumerate().for_each(|(page, &place)| places[place as usize] = page as u32);
    let places = Tensor::new(places, &gpu.device)?;
    let store = |x: &Tensor| x.reshape((num_pages, PAGE_LEN, num_kv_heads, head_dim))?.index_select(&places, 0);
    let (k, v) = (store(&layers.k)?, store(&layers.v)?);
    let table = Tensor::new(table, &gpu.device)?.unsqueeze(0)?;
    let ends = |len: usize| Tensor::new(&[0, len as u32], &gpu.device);
    let (ends_q, ends_k) = (ends(CHUNK)?, ends(tokens)?);
    let flat = q.squeeze(0)?;
    let over_pages = |policy: &Policy| -> Result<Tensor> {
        set_policy(policy.clone());
        let out = flash_attn_varlen_paged_windowed(
            &flat,
            &k,
            &v,
            &ends_q,
            &ends_k,
            &table,
            None,
            CHUNK,
            tokens,
            scale,
            None,
            Some(0),
            PAGE_LEN,
            None,
        );
        set_policy(Policy::Dense);
        Ok(out?.unsqueeze(0)?)
    };
    let has_baseline = cfg!(feature = "flash-attn") && arguments.against_head_dims.contains(&head_dim);
    let contiguous = || -> Result<Tensor> {
        #[cfg(feature = "flash-attn")]
        if has_baseline {
            return Ok(candle_flash_attn::flash_attn(&q, &layers.k, &layers.v, scale, true)?);
        }
        Ok(flash_attn(&q, &layers.k, &layers.v, scale, true)?)
    };
    let baseline = if has_baseline { "candle-flash-attn 0.11.1" } else { "our exact call" };

    let policies = [("by the policy", Policy::S2o(S2oConfig::default())), ("exact", Policy::Dense)];
    let exact = contiguous()?;
    agree("pages", &over_pages(&Policy::Dense)?, &exact, 1e-2)?;
    let [density, error] = density_and_error("pages", || over_pages(&policies[0].1), &exact)?;
    let mut runs = policies.each_ref().map(|(_, policy)| || over_pages(policy).map(drop));
    let [by_policy, by_exact] = &mut runs;
    let medians = gpu.medians(arguments.repeats, &mut [by_policy, by_exact, &mut || contiguous().map(drop)])?;
    let mut rows = Vec::new();
    for ((name, policy), &ms) in policies.iter().zip(&medians) {
        println!("{CHUNK} tokens over {tokens} in pages, {name:13} {ms:9.3} ms, x{:.2} {baseline}", medians[2] / ms);
        let mut row = machine.row("drop-in", &format!("pages, {name}"), &q, &layers.k)?;
        if let Policy::S2o(config) = policy {
            row = measure::Row {
                density: Some(density),
                error: Some(error),
                tau: Some(config.tau().resolve(tokens)),
                ..row
            };
        }
        rows.push(row.against(baseline, ms, medians[2]));
    }
    println!("density {density:.4}, relative error {error:.4}");
    machine.append(&rows, &arguments.place)?;
    Ok(())
}

/// Density of a call by the policy, and its error against `exact`, which must be small enough to be worth a time.
fn density_and_error(name: &str, by_policy: impl FnOnce() -> Result<Tensor>, exact: &Tensor) -> Result<[f64; 2]> {
    collect_stats(true);
    let error = relative_error(&by_policy()?, exact)?;
    let density = AttnStats::joint_density(take_stats()?.iter().map(|call| &call.stats));
    collect_stats(false);
    ensure!(error < 0.5, "{name} by the policy: relative error {error}: not timed");
    Ok([density, error])
}

/// A prompt of the layers, each head `copies` times side by side, by the default policy and exactly.
fn prompt(
    layers: &LayerTensors,
    (copies, softcap): (usize, f32),
    arguments: &Arguments,
    gpu: &Gpu,
    machine: &Machine,
) -> Result<()> {
    let [q, k, v] = [&layers.q, &layers.k, &layers.v].map(|x| Tensor::cat(&vec![x; copies], 3));
    let (q, k, v, scale) = (q?, k?, v?, layers.softmax_scale / copies as f32);
    let by = |policy: Policy| -> Result<Tensor> {
        set_policy(policy);
        let out = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, scale, None, Some(0), softcap);
        set_policy(Policy::Dense);
        Ok(out?)
    };
    let config = S2oConfig::default();
    let by_policy = || by(Policy::S2o(config.clone()));
    let exact = by(Policy::Dense)?;
    let [density, error] = density_and_error(&format!("softcap {softcap}"), by_policy, &exact)?;
    let mut run = || by_policy().map(drop);
    let medians = gpu.medians(arguments.repeats, &mut [&mut run, &mut || by(Policy::Dense).map(drop)])?;
    let name = format!("softcap {softcap}, by the policy");
    let tokens = q.dim(1)?;
    println!(
        "{tokens} tokens, head_dim {}, {name} {:9.3} ms, exact {:9.3} ms, x{:.2}, density {density:.4}, error {error:.4}",
        q.dim(3)?,
        medians[0],
        medians[1],
        medians[1] / medians[0]
    );
    let row = machine.row("drop-in", &name, &q, &k)?;
    let row =
        measure::Row { density: Some(density), error: Some(error), tau: Some(config.tau().resolve(tokens)), ..row };
    machine.append(&[row.against("our exact call", medians[0], medians[1])], &arguments.place)?;
    Ok(())
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    set_policy(Policy::Dense);
    let gpu = Gpu::new()?;
    let machine = gpu.machine()?;
    println!("{}", machine.device());
    if arguments.paged > 0 {
        paged(arguments.paged, &arguments, &gpu, &machine)?;
    }
    for &tokens in arguments.prompts.iter().filter(|&&tokens| tokens > 0) {
        let layers = trained::stacked(tokens, &gpu.device)?;
        for kind in [(1, 50.0), (2, 0.0), (2, 50.0)] {
            prompt(&layers, kind, &arguments, &gpu, &machine)?;
        }
    }
    for &head_dim in &arguments.head_dims {
        let has_baseline = arguments.against_head_dims.contains(&head_dim);
        let mut rows = Vec::new();
        for case in CASES {
            let lengths = if case.is_varlen { &arguments.tokens[..1] } else { &arguments.tokens[..] };
            for &tokens in lengths {
                let tensors = tensors(case, tokens, head_dim, &gpu)?;
                let name = format!("head_dim {head_dim:3} {:12} {:6} tokens", case.name, tensors.k.dim(1)?);
                let mut run = || ours(case, &tensors).map(drop);
                let row = machine.row("drop-in", case.name, &tensors.q, &tensors.k)?;
                if !has_baseline {
                    let ms = gpu.medians(arguments.repeats, &mut [&mut run])?[0];
                    println!("{name} {ms:9.3} ms");
                    rows.push(measure::Row { ms, ..row });
                    continue;
                }
                agree(&name, &ours(case, &tensors)?, &original(case, &tensors)?, 1e-2)?;
                let mut run_original = || original(case, &tensors).map(drop);
                let medians = gpu.medians(arguments.repeats, &mut [&mut run, &mut run_original])?;
                println!(
                    "{name} {:9.3} ms, original {:9.3} ms, x{:.2}",
                    medians[0],
                    medians[1],
                    medians[1] / medians[0]
                );
                rows.push(row.against("candle-flash-attn 0.11.1", medians[0], medians[1]));
            }
        }
        machine.append(&rows, &arguments.place)?;
    }
    Ok(())
}
