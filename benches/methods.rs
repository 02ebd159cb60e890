//! Every published method and S2O on the same tensors of a trained model: time for selection and attention, and
//! density, alternating with exact attention.
//!
//! ```text
//! cargo bench --bench methods -- --tokens 8192
//! cargo bench --bench methods --features cuda,flash-attn -- --tokens 32768,131072
//! cargo bench --bench methods --features cuda,flash-attn -- --tokens 32768 --sweep    # time over error
//! cargo bench --bench methods --features cuda,flash-attn -- --tokens 32768 --sustained
//! ```

#[allow(dead_code, reason = "shared with the other benchmarks")]
#[path = "measure/mod.rs"]
mod measure;
#[allow(dead_code, reason = "the other benchmark takes layers apart")]
#[path = "attention/tensors.rs"]
mod tensors;

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_s2o::{Attention, Dense};
use clap::Parser;
use measure::{Distance, Machine, Row, causal_tflop, median};
use s2o_eval::capture::LayerTensors;
use s2o_eval::experiment::matched_density::settings;
use s2o_eval::limit_threads;
use s2o_eval::method::{self, MethodSpec, Timed};

/// Times the methods and appends to benches/record/.
#[derive(Debug, Parser)]
struct Arguments {
    /// Prompt lengths in tokens.
    #[arg(long, value_delimiter = ',', default_value = "8192")]
    tokens: Vec<usize>,
    /// Methods with options, such as `s2o,xattention:threshold=0.95`; all except dense if absent.
    #[arg(long, value_delimiter = ',')]
    methods: Vec<MethodSpec>,
    /// Run each method at every value of the option that trades error for density.
    #[arg(long)]
    sweep: bool,
    /// Timed runs of each method.
    #[arg(long, default_value = "3")]
    repeats: NonZeroUsize,
    /// Run a method for 0.3 s before each timed call, so that the clock is that of sustained work at the power limit.
    #[arg(long)]
    sustained: bool,
    /// Worker threads on the CPU.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,
    #[command(flatten)]
    place: measure::Place,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    limit_threads(arguments.threads);
    let (device, machine) = place()?;
    println!("{}", machine.device());
    let specs = if arguments.methods.is_empty() {
        let names = method::ALL.iter().map(|row| row.name).filter(|name| *name != "dense");
        names.map(str::parse).collect::<Result<_, _>>()?
    } else {
        arguments.methods
    };
    let specs = if arguments.sweep {
        let values = specs.iter().map(settings).collect::<Result<Vec<_>, _>>()?;
        values.into_iter().flatten().map(|(_, spec)| spec).collect()
    } else {
        specs
    };
    let bench = match (arguments.sweep, arguments.sustained) {
        (false, false) => "methods",
        (false, true) => "methods sustained",
        (true, false) => "methods sweep",
        (true, true) => "methods sweep sustained",
    };
    let warm_up = if arguments.sustained { Duration::from_millis(300) } else { Duration::ZERO };
    for tokens in arguments.tokens {
        let tensors = tensors::stacked(tokens, &device)?;
        let rows = compare((bench, &machine), &tensors, &specs, arguments.repeats.get(), warm_up)?;
        println!("{}", machine.append(&rows, &arguments.place)?.display());
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn place() -> Result<(Device, Machine)> {
    let gpu = measure::gpu::Gpu::new()?;
    let machine = gpu.machine()?;
    Ok((gpu.device, machine))
}

#[cfg(not(feature = "cuda"))]
fn place() -> Result<(Device, Machine)> {
    Ok((Device::Cpu, Machine::here()))
}

/// What the times are compared with: exact attention of another implementation if the build has one, otherwise ours.
const BASELINE: &str = if cfg!(feature = "flash-attn") { "candle-flash-attn 0.11.1" } else { "dense" };

#[cfg(feature = "flash-attn")]
fn baseline(LayerTensors { q, k, v, softmax_scale, .. }: &LayerTensors) -> Result<Tensor> {
    Ok(candle_flash_attn::flash_attn(q, k, v, *softmax_scale, true)?)
}

#[cfg(not(feature = "flash-attn"))]
fn baseline(tensors: &LayerTensors) -> Result<Tensor> {
    Ok(Dense.prefill(&tensors.call()?, &tensors.q, &tensors.k, &tensors.v)?)
}

/// Milliseconds of a call, after the same calls for the time `warm_up`.
fn timed_after(warm_up: Duration, call: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let timed = || {
        let start = Instant::now();
        call()?.device().synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    let start = Instant::now();
    while start.elapsed() < warm_up {
        timed()?;
    }
    timed()
}

fn compare(
    (bench, machine): (&str, &Machine),
    tensors: &LayerTensors,
    specs: &[MethodSpec],
    repeats: usize,
    warm_up: Duration,
) -> Result<Vec<Row>> {
    let LayerTensors { q, k, v, .. } = tensors;
    let call = &tensors.call()?;
    let tokens = call.prompt_len;
    let exact = Dense.prefill(call, q, k, v)?;
    let methods = specs.iter().map(MethodSpec::build).collect::<Result<Vec<_>, _>>()?;
    let mut checked = Vec::new();
    for (spec, method) in specs.iter().zip(&methods) {
        let Timed { out, work, .. } = method.timed(call, q, k, v)?;
        let error = Distance::between(&out, &exact)?;
        ensure!(error.whole.is_finite(), "{spec}: the output is not finite: not timed");
        let work = method::total(&work);
        let density = work.density();
        let Distance { whole, mean_of_heads } = error;
        let spec = spec.to_string();
        print!("{tokens:7} {spec:28} density {density:.4} relative error {whole:.4} mean of heads {mean_of_heads:.4}");
        if let Some(probes) = work.probes {
            let (low, high) = probes.interval();
            print!(", measured on the probes {:.4} ({low:.4} to {high:.4})", probes.relative_error());
        }
        println!();
        checked.push((density, error));
    }
    drop(exact);

    // Each round times the baseline, and each method twice: as models call it, and by its parts.
    let mut times = vec![[Vec::new(), Vec::new(), Vec::new()]; methods.len()];
    let mut baseline_times = Vec::new();
    for _ in 0..repeats {
        baseline_times.push(timed_after(warm_up, || baseline(tensors))?);
        for (method, times) in methods.iter().zip(&mut times) {
            let whole = timed_after(warm_up, || Ok(method.prefill(call, q, k, v)?))?;
            method.take_work()?; // discarded
            let Timed { selection, attention, .. } = method.timed(call, q, k, v)?;
            let [selection, attention] = [selection, attention].map(|part| part.as_secs_f64() * 1e3);
            for (times, time) in times.iter_mut().zip([selection, attention, whole]) {
                times.push(time);
            }
        }
    }
    let baseline_ms = median(baseline_times);
    println!("{tokens:7} {BASELINE:28} {baseline_ms:10.3} ms");
    let tflop = causal_tflop(q, k)?;
    let mut rows = Vec::new();
    for ((spec, (density, error)), times) in specs.iter().zip(checked).zip(times) {
        let [selection, attention, whole] = times.map(median);
        println!(
            "{tokens:7} {:28} {whole:10.3} ms  x{:.2}  selection {selection:.3} attention {attention:.3}",
            spec.to_string(),
            baseline_ms / whole
        );
        for (phase, ms) in [("", whole), (", selection", selection), (", attention", attention)] {
            let tflops = (phase != ", selection").then(|| density * tflop / ms * 1e3);
            let row = machine.row(bench, &format!("{spec}{phase}"), q, k)?;
            let (whole, by_head) = (Some(error.whole), Some(error.mean_of_heads));
            let row = Row { density: Some(density), error: whole, error_by_head: by_head, tflops, ..row };
            rows.push(row.against(BASELINE, ms, baseline_ms));
        }
    }
    Ok(rows)
}
