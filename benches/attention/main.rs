//! Attention alone. Without a subcommand: on a laptop's CPU. `gpu` sweeps lengths and tau on an NVIDIA GPU, `decode` times
//! one query on it.
//!
//! ```text
//! cargo bench --bench attention
//! cargo bench --bench attention -- s2o --tokens 32768
//! cargo bench --bench attention --features cuda,flash-attn -- gpu --tokens 32768,131072 --torch python3
//! cargo bench --bench attention --features cuda -- decode
//! ```

mod cpu;
#[cfg(feature = "cuda")]
mod decode;
#[cfg(feature = "cuda")]
mod gpu;
#[allow(dead_code, reason = "shared with the other benchmarks")]
#[path = "../measure/mod.rs"]
mod measure;
#[allow(dead_code, reason = "the GPU benchmark stacks the layers")]
mod tensors;

use std::num::NonZeroUsize;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use measure::Machine;
use s2o_eval::limit_threads;

/// Times attention and appends to benches/record/.
#[derive(Debug, Parser)]
struct Arguments {
    /// Benchmark to run; all CPU benchmarks if absent.
    what: Option<What>,
    /// Prompt lengths in tokens for `s2o`, `break-even`, `gpu` and `decode`.
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Layers of needle-7m whose tensors are used on the CPU.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3,4,5")]
    layers: Vec<usize>,
    /// Worker threads.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,
    /// Timed runs of each side.
    #[arg(long, default_value = "3")]
    repeats: NonZeroUsize,
    #[command(flatten)]
    place: measure::Place,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    gpu: gpu::GpuArguments,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
enum What {
    /// Our dense attention against Candle's at 8K.
    Dense,
    /// S2O against our dense on needle-7m's tensors.
    S2o,
    /// S2O against our dense on short prompts, to find the length from which S2O is faster.
    BreakEven,
    /// Dense and S2O on a GPU, against candle-flash-attn and PyTorch's cuDNN attention.
    #[cfg(feature = "cuda")]
    Gpu,
    /// One query against all keys on a GPU, as in decoding, against the split kernel.
    #[cfg(feature = "cuda")]
    Decode,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    #[cfg(feature = "cuda")]
    if arguments.what == Some(What::Gpu) {
        return gpu::run(&arguments.gpu, &arguments.tokens, arguments.repeats.get(), &arguments.place);
    }
    #[cfg(feature = "cuda")]
    if arguments.what == Some(What::Decode) {
        return decode::run(&arguments.tokens, arguments.repeats.get(), &arguments.place);
    }
    // Candle has its own pool next to Rayon's: both sides must get the same threads.
    limit_threads(arguments.threads);
    let machine = Machine::here();
    println!("{}", machine.device());
    let wanted = |what| arguments.what.is_none_or(|only| only == what);
    let repeats = arguments.repeats.get();
    let mut rows = Vec::new();
    if wanted(What::Dense) {
        rows.push(cpu::dense(&machine, repeats)?);
    }
    let lengths = |default: &[usize]| {
        if arguments.tokens.is_empty() { default.to_vec() } else { arguments.tokens.clone() }
    };
    if wanted(What::S2o) {
        for tokens in lengths(&[16 << 10, 32 << 10]) {
            rows.extend(cpu::s2o(&machine, repeats, &arguments.layers, "s2o", tokens)?);
        }
    }
    if wanted(What::BreakEven) {
        for tokens in lengths(&[512, 768, 1024, 1536, 2048, 3072, 4096]) {
            rows.extend(cpu::s2o(&machine, repeats, &arguments.layers, "break-even", tokens)?);
        }
    }
    println!("{}", machine.append(&rows, &arguments.place)?.display());
    Ok(())
}
