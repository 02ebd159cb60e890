//! Tensor files with q, k, v: reading files of any origin, writing captured tensors.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::Metadata;

use super::LayerTensors;
use crate::error::{EvalError, Result};

/// Bytes of the header's length, at the start of a safetensors file.
const LENGTH_BYTES: usize = 8;
/// Tensor name and metadata key of the factor on `q . k`.
const SOFTMAX_SCALE: &str = "softmax_scale";
/// Metadata key of the layer that plain q, k, v were captured from.
const LAYER: &str = "layer";

/// An open file with q, k, v of one or more layers.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    /// Byte at which the tensors begin.
    data_start: u64,
    header: Metadata,
    names: BTreeSet<String>,
    /// Layers, each with the prefix of its `q`, `k`, `v`.
    layers: Vec<(usize, String)>,
}

impl TensorFile {
    /// Opens a file and finds its layers.
    ///
    /// # Errors
    /// If the file cannot be read, is not a safetensors file or has no queries.
    pub fn open(path: &Path) -> Result<Self> {
        let (file, data_start, header) = read_header(path)?;
        let names: BTreeSet<String> = header.offset_keys().into_iter().collect();
        let mut layers: Vec<(usize, String)> = names
            .iter()
            .filter_map(|name| {
                let layer = name.strip_prefix("layer.")?.strip_suffix(".q")?.parse().ok()?;
                Some((layer, format!("layer.{layer}.")))
            })
            .collect();
        layers.sort();
        if names.contains("q") {
            let layer = text_of(&header, LAYER).and_then(|layer| layer.parse().ok()).unwrap_or(0);
            layers = vec![(layer, String::new())];
        }
        if layers.is_empty() {
            let parts = "tensors q, k and v, or layer.N.q, layer.N.k and layer.N.v";
            let reason = format!("expected {parts}, got {}", listed(&names));
            return Err(EvalError::TensorFile { path: path.to_owned(), reason });
        }
        Ok(Self { path: path.to_owned(), file: Mutex::new(file), data_start, header, names, layers })
    }

    /// The layers to read: `wanted`, or all layers if `wanted` is empty.
    ///
    /// # Errors
    /// [`EvalError::TensorFile`] for a layer that the file lacks.
    pub fn choose(&self, wanted: &[usize]) -> Result<Vec<usize>> {
        let all: Vec<usize> = self.layers.iter().map(|(layer, _)| *layer).collect();
        if let Some(&got) = wanted.iter().find(|layer| !all.contains(layer)) {
            return Err(self.wrong(format!("expected layers {all:?}, got layer {got}")));
        }
        Ok(if wanted.is_empty() { all } else { wanted.to_vec() })
    }

    /// Reads a layer that [`Self::choose`] returned.
    ///
    /// # Errors
    /// If the layer lacks keys or values, or cannot be read.
    pub fn load(&self, layer: usize, device: &Device) -> Result<LayerTensors> {
        let prefix = self.layers.iter().find(|(l, _)| *l == layer).map_or("", |(_, prefix)| prefix);
        let [q, k, v] = ["q", "k", "v"].map(|name| self.read(&format!("{prefix}{name}"), device));
        let (q, k, v) = (q?, k?, v?);
        let softmax_scale = match self.softmax_scale(prefix)? {
            Some(scale) => scale,
            // Attention itself refuses wrong ranks and sizes.
            None => 1.0 / (q.dims().last().copied().unwrap_or(1) as f32).sqrt(),
        };
        Ok(LayerTensors { layer, q, k, v, softmax_scale })
    }

    fn wrong(&self, reason: String) -> EvalError {
        EvalError::TensorFile { path: self.path.clone(), reason }
    }

    fn read(&self, name: &str, device: &Device) -> Result<Tensor> {
        let Some(info) = self.header.info(name) else {
            let got = listed(&self.names);
            return Err(self.wrong(format!("expected a tensor `{name}` in addition to the queries, got {got}")));
        };
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(self.data_start + start as u64))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|source| EvalError::Io { path: self.path.clone(), source })?;
        drop(file);
        Ok(Tensor::from_raw_buffer(&bytes, info.dtype.try_into()?, &info.shape, device)?)
    }

    /// The scale of the layer, otherwise of the file, otherwise of the metadata.
    fn softmax_scale(&self, prefix: &str) -> Result<Option<f32>> {
        let wrong = |got: String| self.wrong(format!("softmax_scale: expected one number, got {got}"));
        let own = format!("{prefix}{SOFTMAX_SCALE}");
        if let Some(name) = [own.as_str(), SOFTMAX_SCALE].into_iter().find(|name| self.names.contains(*name)) {
            let tensor = self.read(name, &Device::Cpu)?;
            return match tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?[..] {
                [scale] => Ok(Some(scale)),
                _ => Err(wrong(format!("a tensor of shape {:?}", tensor.dims()))),
            };
        }
        match text_of(&self.header, SOFTMAX_SCALE) {
            Some(text) => text.parse().map(Some).map_err(|_| wrong(format!("metadata {text:?}"))),
            None => Ok(None),
        }
    }
}

/// `name`, with the layer as prefix if there is more than one layer.
pub fn tensor_name(name: &str, layer: usize, num_layers: usize) -> String {
    if num_layers == 1 { name.to_owned() } else { format!("layer.{layer}.{name}") }
}

/// Writes q, k, v and the scale in the format that [`TensorFile`] reads.
///
/// # Errors
/// If the file cannot be written.
pub fn save_layers(path: &Path, layers: &[LayerTensors]) -> Result<()> {
    let mut tensors = HashMap::new();
    for layer in layers {
        let name = |part| tensor_name(part, layer.layer, layers.len());
        for (part, tensor) in [("q", &layer.q), ("k", &layer.k), ("v", &layer.v)] {
            tensors.insert(name(part), tensor.clone());
        }
        tensors.insert(name(SOFTMAX_SCALE), Tensor::new(&[layer.softmax_scale], &Device::Cpu)?);
    }
    let metadata = match layers {
        [only] => Some(HashMap::from([(LAYER.to_owned(), only.layer.to_string())])),
        _ => None,
    };
    save_tensors(path, tensors, metadata)
}

/// Writes tensors under their names.
///
/// # Errors
/// If the file cannot be written.
pub fn save_tensors(
    path: &Path,
    tensors: HashMap<String, Tensor>,
    metadata: Option<HashMap<String, String>>,
) -> Result<()> {
    safetensors::serialize_to_file(&tensors, metadata, path)
        .map_err(|error| EvalError::Write { path: path.to_owned(), source: std::io::Error::other(error) })
}

/// The open file, the byte at which its tensors begin, and its header.
fn read_header(path: &Path) -> Result<(File, u64, Metadata)> {
    let read = |source| EvalError::Io { path: path.to_owned(), source };
    let invalid = |reason: String| EvalError::NotSafetensors { path: path.to_owned(), reason };
    let short = |error: std::io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => invalid("it ends before its header does".to_owned()),
        _ => read(error),
    };
    let mut file = File::open(path).map_err(read)?;
    let file_len = file.metadata().map_err(read)?.len();
    let mut length = [0; LENGTH_BYTES];
    file.read_exact(&mut length).map_err(short)?;
    let header_len = u64::from_le_bytes(length);
    let data_start = header_len.saturating_add(LENGTH_BYTES as u64);
    if data_start > file_len {
        return Err(invalid(format!("its header should end at byte {data_start}, got {file_len} bytes")));
    }
    let mut header = vec![0; header_len as usize];
    file.read_exact(&mut header).map_err(short)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|error| invalid(error.to_string()))?;
    let expected = data_start + header.data_len() as u64;
    if expected != file_len {
        return Err(invalid(format!("expected {expected} bytes, got {file_len}")));
    }
    Ok((file, data_start, header))
}

fn text_of<'h>(header: &'h Metadata, key: &str) -> Option<&'h String> {
    header.metadata().as_ref()?.get(key)
}

fn listed(names: &BTreeSet<String>) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text = format!("{text} and {} more", names.len() - SHOWN);
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_what_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qkv.safetensors");
        let tensor =
            |first: f32| Tensor::arange(first, first + 48.0, &Device::Cpu).unwrap().reshape((1, 3, 2, 8)).unwrap();
        let layer = |layer| {
            let (q, k, v) = (tensor(0.0), tensor(1.0), tensor(layer as f32));
            LayerTensors { layer, q, k, v, softmax_scale: 0.25 }
        };
        for layers in [vec![layer(7)], vec![layer(2), layer(11)]] {
            save_layers(&path, &layers).unwrap();
            let file = TensorFile::open(&path).unwrap();
            let numbers: Vec<usize> = layers.iter().map(|layer| layer.layer).collect();
            assert_eq!(file.choose(&[]).unwrap(), numbers);
            for saved in &layers {
                let read = file.load(saved.layer, &Device::Cpu).unwrap();
                assert_eq!((read.layer, read.softmax_scale), (saved.layer, 0.25));
                let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(values(&read.v), values(&saved.v));
                assert_eq!(read.shape().unwrap(), saved.shape().unwrap());
            }
            let error = file.choose(&[5]).unwrap_err().to_string();
            assert!(error.contains("got layer 5"), "{error}");
        }
    }

    #[test]
    fn broken_headers_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("broken.safetensors");
        let header = |len: u64, text: &str| [&len.to_le_bytes()[..], text.as_bytes()].concat();
        for (bytes, words) in [
            (vec![], "it ends before its header does"),
            (header(u64::MAX, "{}"), "got 10 bytes"),
            (header(3, "{]}"), "is not a valid safetensors file"),
            (header(62, r#"{"q":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}        "#), "is not a valid"),
            (header(2, "{}more"), "expected 10 bytes, got 14"),
            (header(2, "{}"), "expected tensors q, k and v, or layer.N.q, layer.N.k and layer.N.v, got none"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = TensorFile::open(&path).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
    }
}
