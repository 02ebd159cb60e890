//! The one decoder: chunked prefill through the [`Attention`] seam, and dense decoding token by token.

use std::fmt;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder};
use candle_s2o::Attention;

use crate::attention::{Phase, SelfAttention};
use crate::chunk::{Chunk, activation_bytes};
use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Need, Result};
use crate::fused::Rotation;
use crate::kv_cache::KvCache;
use crate::layers::{Norm, load_linear, load_tensor};
use crate::mlp::Mlp;
use crate::rope::Rope;

/// Called with the tokens done and the tokens in all.
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// How [`Decoder::prefill`] walks a prompt.
#[derive(Default)]
pub struct PrefillOptions<'a> {
    chunk: Chunk,
    num_logits: Option<usize>,
    progress: Option<&'a mut Progress<'a>>,
}

impl fmt::Debug for PrefillOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefillOptions")
            .field("chunk", &self.chunk)
            .field("num_logits", &self.num_logits)
            .field("progress", &self.progress.is_some())
            .finish()
    }
}

impl<'a> PrefillOptions<'a> {
    /// The whole prompt at once, logits of its last position, no progress reports.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tokens per chunk: bounds the activations, whatever the prompt's length. A number, [`Chunk::Auto`], or `None` to
    /// take the prompt whole.
    #[must_use]
    pub fn chunk(mut self, chunk: impl Into<Chunk>) -> Self {
        self.chunk = chunk.into();
        self
    }

    /// How many of the last positions need logits: 1 to generate, more for perplexity. At most the prompt's length.
    #[must_use]
    pub fn num_logits(mut self, positions: usize) -> Self {
        self.num_logits = Some(positions);
        self
    }

    /// Called after each chunk with the tokens done and the tokens in all.
    #[must_use]
    pub fn on_progress(mut self, progress: &'a mut Progress<'a>) -> Self {
        self.progress = Some(progress);
        self
    }
}

/// What a prefill leaves beside the filled cache.
#[derive(Debug, Clone)]
pub struct PrefillOutput {
    /// Logits of the last positions, `(batch, num_logits, vocab_size)`, f32.
    pub logits: Tensor,
    /// Hidden state of the last position after the final norm, `(batch, hidden_size)`, f32.
    pub hidden: Tensor,
}

impl PrefillOutput {
    /// Logits of the last position, `(batch, vocab_size)`, f32: what the first generated token is sampled from.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] when the prefill was asked for no logits.
    pub fn last_logits(&self) -> Result<Tensor> {
        match self.logits.dim(1)? {
            0 => Err(ModelError::WrongInput {
                what: "positions with logits",
                expected: "at least 1".to_owned(),
                got: "0".to_owned(),
            }),
            positions => Ok(self.logits.narrow(1, positions - 1, 1)?.squeeze(1)?),
        }
    }
}

/// A Llama or Qwen3 decoder.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    rope: Rope,
    dtype: DType,
    device: Device,
}

impl Decoder {
    /// Builds the decoder from weights under Hugging Face names, in the dtype and on the device of `vb`. `progress`
    /// hears about each layer.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::WrongShape`], [`ModelError::UnsupportedFeature`] (a dtype other
    /// than f32, bf16 and f16), [`ModelError::OutOfMemory`], or what reading a tensor failed with.
    ///
    /// On a GPU memory that is released stays with this process ([`DeviceMemory::keep_released`]), and the projections
    /// that share an input are joined in new tensors, one layer at a time: a `vb` that reads files adds one layer's
    /// weights to the peak, one that holds tensors on the GPU all of them.
    pub fn load(config: &DecoderConfig, vb: &VarBuilder, progress: Option<&mut Progress>) -> Result<Self> {
        let config = config.clone().checked("DecoderConfig")?;
        if !matches!(vb.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Err(ModelError::UnsupportedFeature {
                feature: "dtype",
                expected: "f32, bf16 or f16",
                got: format!("{:?}", vb.dtype()),
            });
        }
        // Activations come and go with every layer, and every decoded token makes the host wait.
        DeviceMemory::keep_released(vb.device())?;
        let need = Need {
            what: "holding the weights",
            bytes: (config.num_parameters() * vb.dtype().size_in_bytes()) as u64,
            way_out: "take a smaller model, a GPU with more memory, or bf16 or f16 instead of f32",
        };
        need.check(Self::load_all(config, vb, progress), vb.device())
    }

    fn load_all(config: DecoderConfig, vb: &VarBuilder, progress: Option<&mut Progress>) -> Result<Self> {
        let model = vb.pp("model");
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = Embedding::new(load_tensor(&[vocab, hidden], "weight", &model.pp("embed_tokens"))?, hidden);
        let mut layers = Vec::with_capacity(config.num_layers);
        let mut progress = progress;
        for layer in 0..config.num_layers {
            layers.push(Layer::load(&config, layer, &model.pp(format!("layers.{layer}")))?);
            if let Some(report) = progress.as_mut() {
                report(layer + 1, config.num_layers);
            }
        }
        let head = if config.tie_embeddings {
            Linear::new(embedding.embeddings().clone(), None)
        } else {
            load_linear(hidden, vocab, false, &vb.pp("lm_head"))?
        };
        Ok(Self {
            norm: Norm::load(hidden, config.rms_norm_eps, &model.pp("norm"))?,
            rope: Rope::new(&config.rope, config.head_dim, config.max_positions, vb.dtype(), vb.device())?,
            dtype: vb.dtype(),
            device: vb.device().clone(),
            config,
            embedding,
            layers,
            head,
        })
    }

    /// Shape and constants.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Dtype of weights, activations and cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the weights are and the work is done.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A cache for `batch` sequences of up to `capacity` positions, in this decoder's dtype and on its device.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        KvCache::new(&self.config, batch, capacity, self.dtype, &self.device)
    }

    /// Tokens per sequence of `batch` that a chunk would have now, with caches allocated; `None` for the whole prompt.
    ///
    /// # Errors
    /// If the driver does not say how much memory is free.
    pub fn chunk_tokens(&self, chunk: Chunk, batch: usize) -> Result<Option<usize>> {
        Ok(chunk.tokens(&self.config, self.dtype, batch, DeviceMemory::of(&self.device)?))
    }

    /// Runs prompt tokens `(batch, len)` u32 behind what the cache holds, chunk by chunk, with `method` as attention.
    ///
    /// Only chunk-sized activations live at a time; the output head runs only on the positions whose logits are asked
    /// for. On an error the cache is as long as before.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], [`ModelError::EmptyChunk`], [`ModelError::TokenOutOfRange`],
    /// [`ModelError::ContextTooLong`] (the model), [`ModelError::CacheFull`] (the cache), [`ModelError::WrongInput`]
    /// (rank or batch), [`ModelError::OutOfMemory`], and what `method` fails with.
    pub fn prefill(
        &self,
        tokens: &Tensor,
        cache: &mut KvCache,
        method: &dyn Attention,
        options: PrefillOptions,
    ) -> Result<PrefillOutput> {
        let before = cache.len();
        let result = self.prefill_chunks(tokens, cache, method, options);
        if result.is_err() {
            cache.truncate(before);
        }
        result
    }

    fn prefill_chunks(
        &self,
        tokens: &Tensor,
        cache: &mut KvCache,
        method: &dyn Attention,
        mut options: PrefillOptions,
    ) -> Result<PrefillOutput> {
        let (batch, len) = self.check_tokens(tokens, cache)?;
        let chunk = match self.chunk_tokens(options.chunk, batch)? {
            Some(0) => return Err(ModelError::EmptyChunk),
            Some(tokens) => tokens.min(len),
            None => len,
        };
        let need = Need {
            what: "prefilling a chunk",
            bytes: (batch * chunk) as u64 * activation_bytes(&self.config, self.dtype),
            way_out: "take a smaller chunk, a shorter prompt, or bf16 or f16 instead of f32",
        };
        let num_logits = options.num_logits.unwrap_or(1).min(len);
        let before = cache.len();
        let mut logits = Vec::new();
        let mut last_hidden = None;
        for start in (0..len).step_by(chunk) {
            let count = chunk.min(len - start);
            let phase = Phase::Prefill { method, prompt_len: before + len };
            // From the first position of this chunk that needs logits, or the prompt's last for its hidden state.
            let from = (len - num_logits.max(1)).saturating_sub(start);
            let hidden = self.forward(&tokens.narrow(1, start, count)?, cache, phase, from.min(count));
            let hidden = need.check(hidden, &self.device)?;
            if let Some(hidden) = hidden {
                if num_logits > 0 {
                    let rows = hidden.dim(1)?;
                    logits.push(self.logits_need(batch * rows).check(self.logits(&hidden), &self.device)?);
                }
                last_hidden = Some(hidden);
            }
            if let Some(report) = options.progress.as_mut() {
                report(start + count, len);
            }
        }
        // The last chunk always yields hidden states, because at least one position is asked for.
        let hidden = last_hidden.ok_or(ModelError::EmptyPrompt)?;
        let hidden = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?.to_dtype(DType::F32)?;
        let logits = match logits.len() {
            0 => Tensor::zeros((batch, 0, self.config.vocab_size), DType::F32, &self.device)?,
            1 => logits.remove(0),
            _ => Tensor::cat(&logits, 1)?,
        };
        Ok(PrefillOutput { logits, hidden })
    }

    /// Runs one token per sequence, `(batch, 1)` u32, with dense attention and returns logits `(batch, vocab_size)`,
    /// f32.
    ///
    /// # Errors
    /// As [`Self::prefill`]; [`ModelError::WrongInput`] for more than one token per sequence.
    pub fn decode(&self, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let (batch, len) = self.check_tokens(tokens, cache)?;
        if len != 1 {
            return Err(ModelError::WrongInput {
                what: "tokens per sequence in decoding",
                expected: "1".to_owned(),
                got: len.to_string(),
            });
        }
        let mut logits = || -> Result<Tensor> {
            let hidden = self.forward(tokens, cache, Phase::Decode, 0)?.ok_or(ModelError::EmptyPrompt)?;
            Ok(self.logits(&hidden)?.squeeze(1)?)
        };
        self.logits_need(batch).check(logits(), &self.device)
    }

    /// Logits of hidden states `(batch, len, hidden_size)`, f32.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head.forward(hidden)?.to_dtype(DType::F32)?)
    }

    fn logits_need(&self, rows: usize) -> Need {
        let bytes = self.config.vocab_size * (self.dtype.size_in_bytes() + DType::F32.size_in_bytes());
        Need { what: "computing logits", bytes: (rows * bytes) as u64, way_out: "take fewer positions or sequences" }
    }

    /// All layers over tokens `(batch, len)`; returns the normed hidden states of positions `from..`, if any.
    fn forward(&self, tokens: &Tensor, cache: &mut KvCache, phase: Phase, from: usize) -> Result<Option<Tensor>> {
        let (_, len) = tokens.dims2()?;
        let rotation = self.rope.rows(cache.len(), len)?;
        let mut x = self.embedding.forward(&tokens.contiguous()?)?;
        // What a layer adds to the residual stream is added by the next one's norm, in the same pass.
        let mut delta = None;
        for layer in &self.layers {
            let (sum, mixed) = layer.forward(x, delta, &rotation, cache, phase)?;
            (x, delta) = (sum, Some(mixed));
        }
        cache.advance(len);
        if from == len {
            return Ok(None);
        }
        let last = |x: Tensor| x.narrow(1, from, len - from)?.contiguous();
        let (_, normed) = self.norm.forward(last(x)?, delta.map(last).transpose()?)?;
        Ok(Some(normed))
    }

    fn check_tokens(&self, tokens: &Tensor, cache: &KvCache) -> Result<(usize, usize)> {
        let &[batch, len] = tokens.dims() else {
            return Err(ModelError::WrongInput {
                what: "prompt tensor",
                expected: "(batch, len)".to_owned(),
                got: format!("{:?}", tokens.dims()),
            });
        };
        if batch == 0 || len == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        if batch != cache.batch() || cache.num_layers() != self.layers.len() {
            return Err(ModelError::WrongInput {
                what: "batch and layers of the KV cache",
                expected: format!("{batch} and {}", self.layers.len()),
                got: format!("{} and {}", cache.batch(), cache.num_layers()),
            });
        }
        if tokens.dtype() != DType::U32 {
            return Err(ModelError::WrongInput {
                what: "dtype of the tokens",
                expected: "u32".to_owned(),
                got: format!("{:?}", tokens.dtype()),
            });
        }
        let got = cache.len().saturating_add(len);
        if got > self.config.max_positions {
            return Err(ModelError::ContextTooLong { expected: self.config.max_positions, got });
        }
        cache.check_room(len)?;
        // On a GPU an id outside the embedding would read foreign memory in silence. The ids are few enough to look at
        // here, and Candle's reductions would first have to be compiled by the driver.
        let largest = tokens.flatten_all()?.to_vec1::<u32>()?.into_iter().max().unwrap_or(0);
        if largest as usize >= self.config.vocab_size {
            return Err(ModelError::TokenOutOfRange { expected: self.config.vocab_size, got: largest });
        }
        Ok((batch, len))
    }
}

#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    attention: SelfAttention,
    post_norm: Norm,
    mlp: Mlp,
}

impl Layer {
    fn load(config: &DecoderConfig, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let norm = |name: &str| Norm::load(config.hidden_size, config.rms_norm_eps, &vb.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: SelfAttention::load(config, layer, &vb.pp("self_attn"))?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(config, &vb.pp("mlp"))?,
        })
    }

    /// Adds `delta` of the layer before to the residual stream `x` and returns it after attention, with what the MLP
    /// adds.
    fn forward(
        &self,
        x: Tensor,
        delta: Option<Tensor>,
        rotation: &Rotation,
        cache: &mut KvCache,
        phase: Phase,
    ) -> Result<(Tensor, Tensor)> {
        let (x, attended) = {
            let _span = tracing::debug_span!("attention", layer = self.attention.layer()).entered();
            let (x, normed) = self.input_norm.forward(x, delta)?;
            (x, self.attention.forward(normed, rotation, cache, phase)?)
        };
        let _span = tracing::debug_span!("mlp", layer = self.attention.layer()).entered();
        let (x, normed) = self.post_norm.forward(x, Some(attended))?;
        Ok((x, self.mlp.forward(normed)?))
    }
}
