//! Time to first token on an NVIDIA GPU in bf16, by prompt length and method, in one process: our decoder with S2O and
//! with exact attention, and Candle's own model with candle-flash-attn on the same weights, which takes the prompt in
//! one forward pass.
//!
//! ```text
//! cargo bench --bench prefill --features cuda,flash-attn
//! cargo bench --bench prefill --features cuda -- --shape qwen3-8b --tokens 32768 --methods s2o,dense
//! cargo bench --bench prefill --features cuda -- --layers 2 --tokens 8192 --repeats 1   # does it run at all?
//! cargo bench --bench prefill --features cuda -- --gpus 1,2,4 --tokens 131072 --methods s2o,dense
//! ```

mod checkpoint;
mod decode;
mod logits;
#[allow(dead_code, reason = "shared with the other benchmarks")]
#[path = "../measure/mod.rs"]
mod measure;
mod memory;
mod methods;
mod ranks;
mod report;
mod split;
#[cfg(feature = "flash-attn")]
mod stock;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use candle_core::Tensor;
use checkpoint::{Weights, checkpoint, prompt};
use clap::Parser;
use logits::{EXACT_WITHIN, apart};
use measure::gpu::Gpu;
use measure::{Place, median};
use methods::{Method, Models};
use ranks::Ranks;
use report::{Measured, Report};
use s2o_models::parallel::Mode;
use s2o_models::{Chunk, DecoderConfig, LinearPrecision};

/// Times prefill and appends to benches/record/.
#[derive(Debug, Parser)]
struct Arguments {
    /// `llama-3.1-8b`, `llama-3.1-70b`, `qwen3-8b` or the path of a config.json.
    #[arg(long, default_value = "llama-3.1-8b")]
    shape: String,
    /// Layers to keep of the shape.
    #[arg(long)]
    layers: Option<usize>,
    /// Kind of weights.
    #[arg(long, default_value = "calibrated")]
    weights: Weights,
    /// Prompt lengths in tokens.
    #[arg(long, value_delimiter = ',', default_value = "8192,32768,131072,262144")]
    tokens: Vec<usize>,
    /// Methods to run; all that this build supports if absent.
    #[arg(long, value_delimiter = ',')]
    methods: Vec<Method>,
    /// Timed runs of our decoder, after one run at full length that measures memory.
    #[arg(long, default_value = "3")]
    repeats: usize,
    /// Timed runs of Candle's model, after one such run.
    #[arg(long, default_value = "1")]
    stock_repeats: usize,
    /// Tokens to decode after each prompt with our decoder, to time them.
    #[arg(long, default_value = "0")]
    decode: usize,
    /// Tokens per prefill chunk of our decoder, or `auto` for its own choice.
    #[arg(long, default_value = "auto")]
    chunk: Chunk,
    /// Prompt length at which our exact decoder and Candle's model must agree before anything is timed.
    #[arg(long, default_value = "4096")]
    check_tokens: usize,
    /// Numbers of GPUs; a number above 1 runs our decoder on several, with logits compared to the first number's.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    gpus: Vec<usize>,
    /// What several GPUs share: sequence, tensor or auto.
    #[arg(long, default_value = "auto")]
    parallel: Mode,
    /// Give several GPUs heads of equal work, by a file that `s2o prefill --head-tiles` wrote.
    #[arg(long)]
    head_tiles: Option<PathBuf>,
    /// Where the first of several numbers of GPUs leaves its logits.
    #[arg(long, hide = true)]
    first_logits: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.repeats > 0 && arguments.stock_repeats > 0, "--repeats: expected at least 1, got 0");
    let gpus = match arguments.gpus[..] {
        [number] => number,
        ref several => return ranks::each(several),
    };
    ensure!(gpus > 0, "--gpus: expected at least 1, got 0");
    let shortest = arguments.tokens.iter().copied().min().unwrap_or_default();
    ensure!(shortest > 0, "--tokens: expected lengths of at least 1, got {:?}", arguments.tokens);
    let asks_for_stock = arguments.methods.contains(&Method::Stock);
    ensure!(gpus == 1 || !asks_for_stock, "--methods stock: expected --gpus 1, got {gpus}");
    let decodes = arguments.methods.iter().any(|method| method.decodes());
    ensure!(
        arguments.decode == 0 || gpus == 1 && (decodes || arguments.methods.is_empty()),
        "--decode: expected --gpus 1 and S2O with default options in --methods, got {gpus} GPUs and {:?}",
        arguments.methods
    );
    match Ranks::join(gpus)? {
        None => run(&arguments, None),
        Some(ranks) => {
            ranks.finish(run(&arguments, Some(&ranks)));
            Ok(())
        }
    }
}

/// The work of this process, alone or as one of several ranks.
fn run(arguments: &Arguments, ranks: Option<&Ranks>) -> Result<()> {
    let is_first = ranks.is_none_or(Ranks::is_first);
    let mut methods = if arguments.methods.is_empty() {
        let ours = [Method::S2o, Method::Paper, Method::Dense];
        let stock = (cfg!(feature = "flash-attn") && ranks.is_none()).then_some(Method::Stock);
        ours.into_iter().chain(stock).collect()
    } else {
        arguments.methods.clone()
    };
    let longest = arguments.tokens.iter().copied().max().unwrap_or_default();
    let gpu = ranks.map_or_else(Gpu::new, Ranks::gpu)?;
    let parallel =
        ranks.map(|ranks| ranks.parallel(arguments.parallel, arguments.head_tiles.as_deref(), &gpu)).transpose()?;
    let (config, vb) =
        checkpoint(&arguments.shape, arguments.weights, arguments.layers, longest + 2 * arguments.decode, &gpu.device)?;
    let mut models = Models::load(&gpu, &config, vb, parallel, arguments.chunk, &methods)?;
    methods.retain(|method| *method != Method::Stock || models.stock_name().is_some());
    let report = Report::new(&gpu, &config, &arguments.shape, arguments.weights, models.parallel())?;
    if is_first {
        report.heading();
    }

    let ids =
        |tokens: usize| -> Result<Tensor> { Ok(Tensor::new(prompt(&config, tokens), &gpu.device)?.unsqueeze(0)?) };
    if methods.contains(&Method::Stock) {
        check(&mut models, &ids(arguments.check_tokens)?)?;
    }
    for &tokens in &arguments.tokens {
        let repeats = |method| if method == Method::Stock { arguments.stock_repeats } else { arguments.repeats };
        let first = arguments.first_logits.as_deref().filter(|_| is_first);
        let measured = measure(&gpu, &config, &mut models, &methods, &ids(tokens)?, &repeats, first)?;
        if is_first {
            report.length(tokens, &measured, &arguments.place)?;
        }
        if arguments.decode > 0 && ranks.is_none() {
            report.decoding(tokens, &models.decode(&methods, &ids(tokens)?, arguments.decode)?, &arguments.place)?;
        }
    }
    Ok(())
}

/// Fails if our exact decoder and Candle's model compute different logits.
fn check(models: &mut Models, ids: &Tensor) -> Result<()> {
    let stock = models.run(Method::Stock, ids)?;
    let (error, same) = apart(&models.run(Method::Dense, ids)?, &stock)?;
    println!(
        "{} tokens: logits of our dense decoder and of {} differ by {error:.2e}, {} token",
        ids.dim(1)?,
        models.stock_name().unwrap_or_default(),
        if same { "the same" } else { "another" },
    );
    ensure!(error.is_finite() && (same || error <= EXACT_WITHIN), "the models compute different things: not timed");
    Ok(())
}

/// All methods on one prompt. A method that fails is left out with its reason; the others show how far the GPU reaches.
fn measure(
    gpu: &Gpu,
    config: &DecoderConfig,
    models: &mut Models,
    methods: &[Method],
    ids: &Tensor,
    repeats: &dyn Fn(Method) -> usize,
    first_logits: Option<&Path>,
) -> Result<Vec<Measured>> {
    let tokens = ids.dim(1)?;
    let (mut entered, mut logits) = (Vec::new(), Vec::new());
    for &method in methods {
        match memory::peak(gpu, || models.run(method, ids)) {
            Ok((out, peak)) => {
                logits.push((method, out));
                entered.push(Measured::new(method, peak));
            }
            // The other ranks wait for this method.
            Err(error) if models.parallel().is_some() => return Err(error),
            Err(error) => {
                let reason = error.to_string();
                let reason = reason.lines().next().unwrap_or_default();
                println!("{tokens} tokens: {} does not run: {reason}", method.name());
            }
        }
    }
    if let Some((_, exact)) = logits.iter().find(|(method, _)| *method == Method::Dense) {
        for (measured, (method, out)) in entered.iter_mut().zip(&logits) {
            let (error, same) = apart(out, exact)?;
            ensure!(error.is_finite(), "{}: the logits are no numbers: not timed", method.name());
            measured.error = Some((error, same));
        }
    }
    if let Some(directory) = first_logits {
        for (method, out) in &logits {
            let name = format!("{method:?}-{tokens}");
            if let Some((error, same)) = ranks::off_first(directory, &name, out)? {
                let token = if same { "the same" } else { "another" };
                println!(
                    "{tokens} tokens, {}: logits off the first number of GPUs by {error:.2e}, {token} token",
                    method.name()
                );
            }
        }
    }
    let most = entered.iter().map(|measured| repeats(measured.method)).max().unwrap_or_default();
    for round in 0..most {
        for measured in entered.iter_mut().filter(|measured| round < repeats(measured.method)) {
            measured.times.push(models.first_token_ms(measured.method, ids)?);
        }
    }
    let mut linear: Vec<(LinearPrecision, (f64, f64))> = Vec::new();
    for measured in &mut entered {
        measured.ms = median(measured.times.clone());
        if measured.method != Method::Stock {
            let (split, chunk) = models.split(measured.method, ids)?;
            let precision = measured.method.linear();
            // Several GPUs have their shards of the rows or of the weights.
            if models.parallel().is_none() && linear.iter().all(|(known, _)| *known != precision) {
                linear.push((precision, split::linear_alone(gpu, config, precision, tokens, chunk)?));
            }
            measured.split = Some(split);
            measured.linear = linear.iter().find(|(known, _)| *known == precision).map(|(_, alone)| *alone);
            measured.chunk = Some(chunk);
            measured.density = Some(models.density(measured.method, ids)?);
        }
    }
    Ok(entered)
}
