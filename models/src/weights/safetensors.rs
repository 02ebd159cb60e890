//! A directory in the Hugging Face layout, with its weights mapped into memory.
//!
//! A tensor goes from the map to the device in one copy, and is converted there if the file has another dtype. (Candle
//! makes one more copy on the host for tensors not at a multiple of their element size, which no current writer
//! produces.)

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::DType;
use candle_core::safetensors::MmapedSafetensors;
use candle_nn::VarBuilder;
use serde::Deserialize;
use serde_json::Value;

use super::{LoadOptions, Parts, eos_ids, io_error, read_text, read_tokenizer, refuse_unused};
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::layers::Quantised;

pub(super) const CONFIG: &str = "config.json";
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The configuration, and the end tokens in its file.
pub(super) fn config(directory: &Path) -> Result<(DecoderConfig, Vec<u32>)> {
    if !directory.is_dir() {
        let hint = ": there is no such directory".to_owned();
        return Err(ModelError::MissingFile { path: directory.to_owned(), hint });
    }
    let config_path = directory.join(CONFIG);
    let json = read_text(&config_path, ": a model directory needs it")?;
    let origin = config_path.display().to_string();
    Ok((DecoderConfig::from_json(&json, &origin)?, eos_ids(&json, &origin)?))
}

pub(super) fn open(directory: &Path, dtype: DType, options: &LoadOptions) -> Result<Parts> {
    let (config, mut eos) = config(directory)?;
    let generation_path = directory.join(GENERATION_CONFIG);
    if generation_path.exists() {
        let json = read_text(&generation_path, "")?;
        eos.extend(eos_ids(&json, &generation_path.display().to_string())?);
    }
    let tokenizer = read_tokenizer(options.tokenizer.as_deref().unwrap_or(&directory.join(TOKENIZER)))?;
    let files = weight_files(directory)?;
    for file in &files {
        check(file, &config)?;
    }
    // SAFETY: the map is only read, while the decoder copies or converts each tensor out of it. A process that rewrites
    // the file in place meanwhile would change what is read, which every user of memory-mapped weights accepts.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, &options.device)? };
    // A second map costs no memory.
    let files = match options.parallel {
        // SAFETY: as above.
        Some(_) => Some(unsafe { MmapedSafetensors::multi(&files)? }),
        None => None,
    };
    Ok(Parts { config, vb, quantised: Quantised::new(), files, tokenizer, eos_ids: eos })
}

/// The one weight file, or the shards that the index names.
fn weight_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let single = directory.join(SINGLE);
    let index = directory.join(INDEX);
    if single.exists() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        let hint =
            format!(": a model directory needs it, or {INDEX} with its shards (pytorch .bin files are not read)");
        return Err(ModelError::MissingFile { path: single, hint });
    }
    let files: Vec<PathBuf> = shard_names(&index)?.iter().map(|name| directory.join(name)).collect();
    match files.iter().find(|file| !file.exists()) {
        Some(missing) => {
            Err(ModelError::MissingFile { path: missing.clone(), hint: format!(": {INDEX} names it as a shard") })
        }
        None => Ok(files),
    }
}

/// File names in a `model.safetensors.index.json`, sorted and unique.
pub(super) fn shard_names(path: &Path) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let origin = path.display().to_string();
    let index: Index = serde_json::from_str(&read_text(path, "")?).map_err(|e| ModelError::config(&origin, e))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    // An index is not trusted: it must not lead out of the directory.
    if let Some(bad) = names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        return Err(ModelError::config(origin, format!("shard `{bad}` is not a plain file name")));
    }
    Ok(names.into_iter().collect())
}

/// Reads a weight file's header, which also checks that the file is as long as the header says, and that the model uses
/// its tensors.
fn check(path: &Path, config: &DecoderConfig) -> Result<()> {
    File::open(path).map_err(|error| io_error(path, "", error))?;
    // SAFETY: the map is read once here and dropped; see `open`.
    match unsafe { MmapedSafetensors::new(path) } {
        Ok(weights) => {
            let tensors = weights.tensors();
            refuse_unused(config, tensors.iter().map(|(name, _)| name.as_str()), str::to_owned, path)?;
            // Numbers of other types need scales, which only their own program knows.
            let is_float =
                |dtype: Result<DType, _>| matches!(dtype, Ok(DType::F64 | DType::F32 | DType::F16 | DType::BF16));
            let other = tensors.iter().find(|(_, view)| !is_float(DType::try_from(view.dtype())));
            let Some((name, view)) = other else { return Ok(()) };
            let reason = format!("tensor `{name}`: expected F32, F16 or BF16, got {:?}", view.dtype());
            Err(ModelError::InvalidWeights { path: path.to_owned(), reason })
        }
        Err(error) => {
            let reason = wrong_length(path).unwrap_or_else(|| first_line(&error));
            Err(ModelError::InvalidWeights { path: path.to_owned(), reason })
        }
    }
}

/// Says how long a file should be by its header, if it is not. `None` if the header tells no length.
fn wrong_length(path: &Path) -> Option<String> {
    /// The format's limit on the header.
    const LONGEST_HEADER: u64 = 100_000_000;
    let mut file = File::open(path).ok()?;
    let got = file.metadata().ok()?.len();
    let mut prefix = [0; 8];
    if file.read_exact(&mut prefix).is_err() {
        return Some(format!("expected at least 8 bytes, got {got}"));
    }
    let header_len = u64::from_le_bytes(prefix);
    if header_len > LONGEST_HEADER {
        return None;
    }
    if got < 8 + header_len {
        return Some(format!("expected more than the header's {} bytes, got {got}", 8 + header_len));
    }
    let header: HashMap<String, Value> = serde_json::from_reader(file.take(header_len)).ok()?;
    let ends = header.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    let expected = ends.max()?.saturating_add(8 + header_len);
    (expected != got).then(|| format!("expected {expected} bytes, got {got}"))
}

/// A Candle error without its backtrace.
pub(super) fn first_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
