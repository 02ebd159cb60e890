//! GGUF files of architecture `llama` and `qwen3`. Quantised matrices stay quantised, or are dequantised while loading.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file::Content;
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

pub(super) fn open(path: &Path, dtype: DType, options: &LoadOptions) -> Result<Parts> {
    let (content, reader) = read(path)?;
    let mut source = Source { content, reader, path, device: options.device.clone() };
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
    Ok(Parts { config, vb, quantised, tokenizer, eos_ids })
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
    let content = Content::read(&mut reader).map_err(|error| invalid(first_line(&error)))?;
    check_length(&content, file_len).map_err(invalid)?;
    Ok((content, reader))
}

/// Bytes of the weights in `dtype`.
pub(super) fn dequantised_bytes(path: &Path, dtype: DType) -> Result<u64> {
    let elements = read(path)?.0.tensor_infos.values().map(|info| info.shape.elem_count() as u64).sum::<u64>();
    Ok(elements * dtype.size_in_bytes() as u64)
}

/// Checks that every tensor ends within the file. A truncated download would otherwise fail after minutes.
fn check_length(content: &Content, file_len: u64) -> Result<(), String> {
    for (name, info) in &content.tensor_infos {
        let blocks = info.shape.elem_count().div_ceil(info.ggml_dtype.block_size());
        let bytes = blocks as u64 * info.ggml_dtype.type_size() as u64;
        let end = content.tensor_data_offset.saturating_add(info.offset).saturating_add(bytes);
        if end > file_len {
            return Err(format!("tensor `{name}` ends at byte {end}, expected at most the file's {file_len}"));
        }
    }
    Ok(())
}

struct Source<'p> {
    content: Content,
    reader: BufReader<File>,
    path: &'p Path,
    device: Device,
}

impl Source<'_> {
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
