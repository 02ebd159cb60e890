//! Reads one file in a process of its own: prints a digest of what it read, or an error and exit code 1.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_s2o::Dense;
use s2o_eval::load;
use s2o_eval::report::{markdown, rows};
use s2o_eval::run::{Journal, read_outcomes};
use s2o_models::{LoadOptions, ModelSource, PrefillOptions};
use tokenizers::Tokenizer;

/// First argument of a reader.
pub const WORD: &str = "--read";

/// Exit code of an output that is not a number: neither read nor refused.
const GARBAGE: u8 = 3;

/// Prints what `kind` of file is in `directory`.
pub fn read(kind: &str, directory: &Path) -> ExitCode {
    let text = match kind {
        "model" => model(directory),
        "ruler" => load::ruler_directory(directory).map(|items| format!("{items:?}")).map_err(Into::into),
        "longbench" => longbench(directory),
        "infinitebench" => infinitebench(directory),
        "journal" => journal(directory),
        _ => unreachable!("kinds are those of the originals"),
    };
    match text {
        Ok(text) if text.is_empty() => ExitCode::from(GARBAGE),
        Ok(text) => {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            println!("{:016x}", hasher.finish());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The bits of the logits after a short text; empty if one is not a number. A GGUF file is read twice: with its
/// quantised weights, as by default, and dequantised.
fn model(directory: &Path) -> Result<String> {
    let gguf = directory.join("model.gguf");
    match gguf.exists() {
        true => {
            let texts = [logits(&gguf, None)?, logits(&gguf, Some(DType::F32))?];
            Ok(if texts.iter().any(String::is_empty) { String::new() } else { texts.concat() })
        }
        false => logits(directory, Some(DType::F32)),
    }
}

fn logits(path: &Path, dtype: Option<DType>) -> Result<String> {
    let source: ModelSource = path.to_string_lossy().parse()?;
    let model = source.load(&LoadOptions { dtype, ..Default::default() }, None)?;
    let tokens = model.encode("the 12 theories")?;
    ensure!(!tokens.is_empty(), "expected tokens, got none");
    let mut cache = model.decoder.new_cache(1, tokens.len() + 8)?;
    let input = Tensor::new(tokens.as_slice(), &Device::Cpu)?.unsqueeze(0)?;
    let logits = model.decoder.prefill(&input, &mut cache, &Dense, PrefillOptions::new())?.last_logits()?;
    cache.check_logits(&logits)?;
    let logits: Vec<f32> = logits.flatten_all()?.to_vec1()?;
    let mut text = format!("{tokens:?} {:?}", model.eos_ids);
    for logit in logits {
        if !logit.is_finite() {
            return Ok(String::new());
        }
        write!(text, " {:08x}", logit.to_bits())?;
    }
    Ok(text)
}

fn tokenizer() -> Result<Tokenizer> {
    s2o_needle_11m::TOKENIZER.parse().map_err(|error| anyhow::anyhow!("{error}"))
}

fn longbench(directory: &Path) -> Result<String> {
    Ok(format!("{:?}", load::longbench_v2(&directory.join("data.json"), &tokenizer()?, 100)?))
}

fn infinitebench(directory: &Path) -> Result<String> {
    Ok(format!("{:?}", load::infinitebench_directory(directory, &tokenizer()?, 100)?))
}

/// The tables of a journal that also can be continued.
fn journal(directory: &Path) -> Result<String> {
    let path = directory.join("outcomes.jsonl");
    let outcomes = read_outcomes(&path)?;
    let rows = rows(&outcomes);
    if rows.iter().any(|row| row.score.is_some_and(|score| !(0.0..=1.0).contains(&score)) || row.density.is_nan()) {
        return Ok(String::new());
    }
    let text = format!("{}{:?}", markdown(&outcomes), outcomes);
    if Journal::open(&path)?.outcomes() != outcomes {
        bail!("expected the outcomes of the report in the continued journal, got others");
    }
    Ok(text)
}
