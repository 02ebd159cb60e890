//! GGUF files of architecture `llama` and `qwen3`. Quantised matrices stay quantised, or are dequantised while loading.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file::{Content, DEFAULT_ALIGNMENT};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;

use super::safetensors::first_line;
use super::{LoadOptions, Parts, gguf_tokenizer, io_error, read_tokenizer, refuse_unused};
use crate::config::{Architecture, DecoderConfig};
use crate::error::{ModelError, Result};
use crate::layers::Quantised;

/// Divisors of the rotary frequencies, present in Llama 3.1 and later.
const ROPE_FREQS: &str = "rope_freqs.weight";

pub(super) fn config(path: &Path) -> Result<DecoderConfig> {
    Source::open(path, &Device::Cpu)?.config()
}

pub(super) fn open(path: &Path, dtype: DType, options: &LoadOptions) -> Result<Parts> {
    let mut source = Source::open(path, &options.device)?;
    let config = source.config()?;
    refuse_unused(&config, source.content.tensor_infos.keys().map(String::as_str), gguf_name, path)?;
    let (mut tensors, mut quantised) = (HashMap::new(), Quantised::new());
    for (name, shape) in config.tensor_shapes() {
        let blocks = source.blocks(&config, &name, &shape)?;
        if options.keeps_quantised() && is_quantised(blocks.dtype()) {
            quantised.insert(name, Arc::new(source.on_device(blocks)?));
        } else {
            tensors.insert(name, blocks.dequantize(&source.device)?.to_dtype(dtype)?);
        }
    }
    let eos_ids = gguf_tokenizer::eos_ids(&source.content);
    let tokenizer = match &options.tokenizer {
        Some(path) => read_tokenizer(path)?,
        None => gguf_tokenizer::build(source.content)?,
    };
    let vb = VarBuilder::from_tensors(tensors, dtype, &options.device);
    Ok(Parts { config, vb, quantised, files: None, tokenizer, eos_ids })
}

/// Whether weights of this type are blocks that Candle multiplies on all devices.
fn is_quantised(dtype: GgmlDType) -> bool {
    use GgmlDType::{BF16, F16, F32, Q8_1, Q8K};
    !matches!(dtype, F32 | F16 | BF16 | Q8_1 | Q8K)
}

/// The metadata and the list of tensors, and the file for their contents.
fn read(path: &Path) -> Result<(Content, BufReader<File>)> {
    let file = File::open(path).map_err(|error| io_error(path, "", error))?;
    let file_len = file.metadata().map_err(|error| io_error(path, "", error))?.len();
    let mut reader = BufReader::new(file);
    let invalid = |reason: String| ModelError::InvalidWeights { path: path.to_owned(), reason };
    if file_len == 0 {
        return Err(invalid("the file is empty".to_owned()));
    }
    let start = start_of(&mut reader).map_err(|error| io_error(path, "", error))?;
    if !start.starts_with(b"GGUF") {
        let magic = start[..start.len().min(4)].escape_ascii();
        return Err(invalid(format!("expected a file that begins with \"GGUF\", got \"{magic}\"")));
    }
    if has_no_alignment(&start) {
        return Err(invalid("general.alignment: expected at least 1, got 0".to_owned()));
    }
    drop(start);
    let content = Content::read(&mut reader).map_err(|error| invalid(first_line(&error)))?;
    check_offsets(&content, file_len).map_err(invalid)?;
    Ok((content, reader))
}

/// The start of a file, with its metadata.
fn start_of(reader: &mut BufReader<File>) -> std::io::Result<Vec<u8>> {
    const METADATA: u64 = 64 << 20;
    let mut start = Vec::new();
    reader.take(METADATA).read_to_end(&mut start)?;
    reader.rewind()?;
    Ok(start)
}

/// Whether the metadata, which is at the start of a file, has an alignment of 0. Candle divides by it.
fn has_no_alignment(start: &[u8]) -> bool {
    const KEY: &[u8] = b"general.alignment";
    let Some(at) = start.windows(KEY.len()).position(|bytes| bytes == KEY) else { return false };
    // The type of the value, which is 0 to 5 for integers of 1, 1, 2, 2, 4 and 4 bytes, and the value.
    let [kind, 0, 0, 0, value @ ..] = &start[at + KEY.len()..] else { return false };
    let width = [1, 1, 2, 2, 4, 4].get(usize::from(*kind));
    width.and_then(|width| value.get(..*width)).is_some_and(|value| value.iter().all(|byte| *byte == 0))
}

/// Bytes of the weights in `dtype`.
pub(super) fn dequantised_bytes(path: &Path, dtype: DType) -> Result<u64> {
    let elements = read(path)?.0.tensor_infos.values().map(|info| info.shape.elem_count() as u64).sum::<u64>();
    Ok(elements * dtype.size_in_bytes() as u64)
}

/// Checks that the tensors follow each other without a gap, each at the next multiple of the alignment, and that the
/// last ends where the file does. Other offsets, or a type of another size, would give garbage; a truncated download
/// would fail after minutes.
fn check_offsets(content: &Content, file_len: u64) -> Result<(), String> {
    let alignment = content.metadata.get("general.alignment").and_then(|value| value.to_u64().ok());
    let alignment = alignment.unwrap_or(DEFAULT_ALIGNMENT);
    let mut tensors: Vec<_> = content.tensor_infos.iter().collect();
    // Tensors without elements share their offset with the next.
    tensors.sort_by_key(|(name, info)| (info.offset, info.shape.elem_count(), *name));
    let mut expected = 0;
    for (name, info) in tensors {
        let got = info.offset;
        if got != expected {
            return Err(format!(
                "tensor `{name}` is at byte {got} of the data, expected byte {expected}: after the tensor before it, \
                 aligned to {alignment} bytes"
            ));
        }
        let blocks = info.shape.elem_count().div_ceil(info.ggml_dtype.block_size());
        let data_end = got.saturating_add((blocks as u64).saturating_mul(info.ggml_dtype.type_size() as u64));
        let end = content.tensor_data_offset.saturating_add(data_end);
        if end > file_len {
            return Err(format!("tensor `{name}` ends at byte {end}, expected at most the file's {file_len}"));
        }
        expected = data_end.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    }
    let end = content.tensor_data_offset.saturating_add(expected);
    if file_len > end {
        return Err(format!("expected {end} bytes, which the tensors fill, got {file_len}"));
    }
    Ok(())
}

struct Source<'p> {
    content: Content,
    reader: BufReader<File>,
    path: &'p Path,
    device: Device,
}

impl<'p> Source<'p> {
    fn open(path: &'p Path, device: &Device) -> Result<Self> {
        let (content, reader) = read(path)?;
        Ok(Self { content, reader, path, device: device.clone() })
    }

    fn config(&mut self) -> Result<DecoderConfig> {
        let divisors = match self.content.tensor_infos.contains_key(ROPE_FREQS) {
            true => Some(self.read(ROPE_FREQS)?.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?),
            false => None,
        };
        DecoderConfig::from_gguf(&self.content, divisors, &self.path.display().to_string())
    }

    /// A weight under its Hugging Face name and in its Hugging Face layout, on the CPU.
    fn blocks(&mut self, config: &DecoderConfig, hf_name: &str, shape: &[usize]) -> Result<QTensor> {
        let name = gguf_name(hf_name);
        let info =
            self.content.tensor_infos.get(&name).ok_or_else(|| ModelError::MissingTensor { name: name.clone() })?;
        if info.shape.dims() != shape {
            let got = info.shape.dims().to_vec();
            return Err(ModelError::WrongShape { name, expected: shape.to_vec(), got });
        }
        let blocks = self.read(&name)?;
        match (config.architecture, hf_name) {
            (Architecture::Llama, name) if name.contains("q_proj") => half_split(&blocks, config.num_heads),
            (Architecture::Llama, name) if name.contains("k_proj") => half_split(&blocks, config.num_kv_heads),
            _ => Ok(blocks),
        }
    }

    fn read(&mut self, name: &str) -> Result<QTensor> {
        self.content.tensor(&mut self.reader, name, &Device::Cpu).map_err(|error| {
            let reason = format!("tensor `{name}`: {}", first_line(&error));
            ModelError::InvalidWeights { path: self.path.to_owned(), reason }
        })
    }

    fn on_device(&self, blocks: QTensor) -> Result<QTensor> {
        match self.device {
            Device::Cpu => Ok(blocks),
            _ => with_data(&blocks, blocks.data()?, &self.device),
        }
    }
}

/// A tensor of the shape and type of `like`.
fn with_data(like: &QTensor, data: Cow<[u8]>, device: &Device) -> Result<QTensor> {
    Ok(QTensor::new(QStorage::from_data(data, device, like.dtype())?, like.shape())?)
}

/// Undoes the row order of llama.cpp's conversion, which interleaves the two halves of each Llama head (its rotation
/// pairs neighbours). Qwen3 files keep the half-split order. Rows are whole numbers of blocks.
fn half_split(blocks: &QTensor, num_heads: usize) -> Result<QTensor> {
    let rows = blocks.shape().dims()[0];
    let half = rows / num_heads / 2;
    let data = blocks.data()?;
    let row_bytes = data.len() / rows;
    let mut split = Vec::with_capacity(data.len());
    for row in 0..rows {
        let (head, is_second, pair) = (row / (2 * half), row / half % 2, row % half);
        let from = (head * 2 * half + 2 * pair + is_second) * row_bytes;
        split.extend_from_slice(&data[from..from + row_bytes]);
    }
    with_data(blocks, split.into(), &Device::Cpu)
}

fn gguf_name(hf_name: &str) -> String {
    match hf_name {
        "model.embed_tokens.weight" => return "token_embd.weight".to_owned(),
        "model.norm.weight" => return "output_norm.weight".to_owned(),
        "lm_head.weight" => return "output.weight".to_owned(),
        _ => {}
    }
    let renamed = hf_name.replace("model.layers.", "blk.");
    [
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(renamed, |name, (hf, gguf)| name.replace(hf, gguf))
}
