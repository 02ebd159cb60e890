//! Files of q, k, v: reading those of any origin, writing captured ones.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use thiserror::Error;

/// Tensor and metadata key of the factor on `q . k`.
const SOFTMAX_SCALE: &str = "softmax_scale";
/// Metadata key of the layer that plain q, k, v were captured from.
const LAYER: &str = "layer";

/// The operands of one attention call.
#[derive(Debug, Clone)]
pub struct LayerTensors {
    /// The decoder layer they come from.
    pub layer: usize,
    /// (batch, q_len, num_heads, head_dim)
    pub q: Tensor,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub k: Tensor,
    /// (batch, k_len, num_kv_heads, head_dim)
    pub v: Tensor,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
}

/// What is wrong with a tensor file.
#[derive(Debug, Error)]
pub enum TensorFileError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} is not a valid safetensors file: {reason}", path.display())]
    Invalid { path: PathBuf, reason: String },
    #[error("{}: expected tensors q, k and v, or layer.N.q, layer.N.k and layer.N.v, got {got}", path.display())]
    NoQueries { path: PathBuf, got: String },
    #[error("{}: expected a tensor `{expected}` beside the queries, got {got}", path.display())]
    Missing { path: PathBuf, expected: String, got: String },
    #[error("{}: expected layers {expected:?}, got --layers {got}", path.display())]
    NoSuchLayer { path: PathBuf, expected: Vec<usize>, got: usize },
    #[error("{}: softmax_scale: expected one number, got {got}", path.display())]
    SoftmaxScale { path: PathBuf, got: String },
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// An open file of q, k, v of one layer or several.
pub struct TensorFile {
    path: PathBuf,
    tensors: MmapedSafetensors,
    names: BTreeSet<String>,
    metadata: HashMap<String, String>,
    /// Layers, each with what stands before `q`, `k`, `v`.
    layers: Vec<(usize, String)>,
}

impl TensorFile {
    /// Opens a file and finds its layers.
    pub fn open(path: &Path) -> Result<Self, TensorFileError> {
        let io = |source| TensorFileError::Io { path: path.to_owned(), source };
        let invalid = |reason: &dyn ToString| TensorFileError::Invalid {
            path: path.to_owned(),
            reason: reason.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        let mut file = File::open(path).map_err(io)?;
        // SAFETY: the map is only read. A process that rewrites the file meanwhile would change what is read, which
        // every user of memory-mapped tensors accepts.
        let tensors = unsafe { MmapedSafetensors::new(path) }.map_err(|error| invalid(&error))?;
        let metadata = read_metadata(&mut file).map_err(|error| invalid(&error))?;
        let names: BTreeSet<String> = tensors.tensors().into_iter().map(|(name, _)| name).collect();

        let mut layers: Vec<(usize, String)> = names
            .iter()
            .filter_map(|name| {
                let layer = name.strip_prefix("layer.")?.strip_suffix(".q")?.parse().ok()?;
                Some((layer, format!("layer.{layer}.")))
            })
            .collect();
        layers.sort();
        if names.contains("q") {
            let layer = metadata.get(LAYER).and_then(|layer| layer.parse().ok()).unwrap_or(0);
            layers = vec![(layer, String::new())];
        }
        if layers.is_empty() {
            return Err(TensorFileError::NoQueries { path: path.to_owned(), got: listed(&names) });
        }
        Ok(Self { path: path.to_owned(), tensors, names, metadata, layers })
    }

    /// The layers to read: those asked for, or all.
    pub fn choose(&self, wanted: &[usize]) -> Result<Vec<usize>, TensorFileError> {
        let all: Vec<usize> = self.layers.iter().map(|(layer, _)| *layer).collect();
        if let Some(&got) = wanted.iter().find(|layer| !all.contains(layer)) {
            return Err(TensorFileError::NoSuchLayer { path: self.path.clone(), expected: all, got });
        }
        Ok(if wanted.is_empty() { all } else { wanted.to_vec() })
    }

    /// Reads a layer that [`Self::choose`] named.
    pub fn load(&self, layer: usize, device: &Device) -> Result<LayerTensors, TensorFileError> {
        let prefix = self.layers.iter().find(|(l, _)| *l == layer).map_or("", |(_, prefix)| prefix);
        let [q, k, v] = ["q", "k", "v"].map(|name| {
            let name = format!("{prefix}{name}");
            if !self.names.contains(&name) {
                let (path, got) = (self.path.clone(), listed(&self.names));
                return Err(TensorFileError::Missing { path, expected: name, got });
            }
            Ok(self.tensors.load(&name, device)?)
        });
        let (q, k, v) = (q?, k?, v?);
        let softmax_scale = match self.softmax_scale(prefix)? {
            Some(scale) => scale,
            // Rank and sizes are for attention itself to refuse.
            None => 1.0 / (q.dims().last().copied().unwrap_or(1) as f32).sqrt(),
        };
        Ok(LayerTensors { layer, q, k, v, softmax_scale })
    }

    /// The layer's own, the file's, or the metadata's.
    fn softmax_scale(&self, prefix: &str) -> Result<Option<f32>, TensorFileError> {
        let wrong = |got: String| TensorFileError::SoftmaxScale { path: self.path.clone(), got };
        let own = format!("{prefix}{SOFTMAX_SCALE}");
        if let Some(name) = [own.as_str(), SOFTMAX_SCALE].into_iter().find(|name| self.names.contains(*name)) {
            let tensor = self.tensors.load(name, &Device::Cpu)?;
            return match tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?[..] {
                [scale] => Ok(Some(scale)),
                _ => Err(wrong(format!("a tensor of shape {:?}", tensor.dims()))),
            };
        }
        match self.metadata.get(SOFTMAX_SCALE) {
            Some(text) => text.parse().map(Some).map_err(|_| wrong(format!("metadata {text:?}"))),
            None => Ok(None),
        }
    }
}

/// `name` where there is one layer, else with the layer before it.
pub fn name(name: &str, layer: usize, num_layers: usize) -> String {
    if num_layers == 1 { name.to_owned() } else { format!("layer.{layer}.{name}") }
}

/// Writes q, k, v and the scale, as [`TensorFile`] reads them.
pub fn save_layers(path: &Path, layers: &[LayerTensors]) -> Result<()> {
    let mut tensors = HashMap::new();
    for layer in layers {
        for (part, tensor) in [("q", &layer.q), ("k", &layer.k), ("v", &layer.v)] {
            tensors.insert(name(part, layer.layer, layers.len()), tensor.clone());
        }
        tensors
            .insert(name(SOFTMAX_SCALE, layer.layer, layers.len()), Tensor::new(&[layer.softmax_scale], &Device::Cpu)?);
    }
    let metadata = match layers {
        [only] => Some(HashMap::from([(LAYER.to_owned(), only.layer.to_string())])),
        _ => None,
    };
    write(path, tensors, metadata)
}

/// Writes tensors by name.
pub fn write(path: &Path, tensors: HashMap<String, Tensor>, metadata: Option<HashMap<String, String>>) -> Result<()> {
    safetensors::serialize_to_file(&tensors, metadata, path).with_context(|| format!("cannot write {}", path.display()))
}

/// The metadata of a safetensors file, which Candle does not hand out: a JSON header behind its length.
fn read_metadata(file: &mut File) -> std::io::Result<HashMap<String, String>> {
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let header: serde_json::Value = serde_json::from_reader(file.take(u64::from_le_bytes(len)))?;
    Ok(header.get("__metadata__").and_then(|data| serde_json::from_value(data.clone()).ok()).unwrap_or_default())
}

fn listed(names: &BTreeSet<String>) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text = format!("{text} and {} more", names.len() - SHOWN);
    }
    if text.is_empty() { "none".to_owned() } else { text }
}
