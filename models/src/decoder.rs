//! The one decoder: chunked prefill through the [`Attention`] seam, and dense decoding token by token.

use std::fmt;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, Linear, Module, RmsNorm, VarBuilder};
use candle_s2o::Attention;

use crate::attention::{Phase, SelfAttention};
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::kv_cache::KvCache;
use crate::layers::{load_linear, load_norm, load_tensor};
use crate::rope::Rope;

/// Elements of one MLP intermediate that are held at a time (three such tensors live at once).
const MLP_ELEMENTS: usize = 1 << 24;

/// Called with the tokens done and the tokens in all.
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// How [`Decoder::prefill`] walks a prompt.
#[derive(Default)]
pub struct PrefillOptions<'a> {
    chunk: Option<usize>,
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

    /// Tokens per chunk: bounds the activations, whatever the prompt's length. `None` takes the prompt whole.
    #[must_use]
    pub fn chunk(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.chunk = tokens.into();
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
    norm: RmsNorm,
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
    /// [`ModelError::MissingTensor`], [`ModelError::WrongShape`], or what reading a tensor failed with.
    pub fn load(config: &DecoderConfig, vb: &VarBuilder, progress: Option<&mut Progress>) -> Result<Self> {
        let config = config.clone().checked("DecoderConfig")?;
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
            norm: load_norm(hidden, config.rms_norm_eps, &model.pp("norm"))?,
            rope: Rope::new(&config.rope, config.head_dim, config.max_positions, vb.dtype(), vb.device()),
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
    /// [`ModelError::ContextTooLong`] when the model has fewer positions.
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        KvCache::new(&self.config, batch, capacity, self.dtype, &self.device)
    }

    /// Runs prompt tokens `(batch, len)` u32 behind what the cache holds, chunk by chunk, with `method` as attention.
    ///
    /// Only chunk-sized activations live at a time; the output head runs only on the positions whose logits are asked
    /// for. On an error the cache is as long as before.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], [`ModelError::EmptyChunk`], [`ModelError::TokenOutOfRange`],
    /// [`ModelError::ContextTooLong`] (the model), [`ModelError::CacheFull`] (the cache), [`ModelError::WrongInput`]
    /// (rank or batch), and what `method` fails with.
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
        let chunk = match options.chunk {
            Some(0) => return Err(ModelError::EmptyChunk),
            Some(tokens) => tokens.min(len),
            None => len,
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
            let hidden = self.forward(&tokens.narrow(1, start, count)?, cache, phase, from.min(count))?;
            if let Some(hidden) = hidden {
                if num_logits > 0 {
                    logits.push(self.head.forward(&hidden)?.to_dtype(DType::F32)?);
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
        let (_, len) = self.check_tokens(tokens, cache)?;
        if len != 1 {
            return Err(ModelError::WrongInput {
                what: "tokens per sequence in decoding",
                expected: "1".to_owned(),
                got: len.to_string(),
            });
        }
        let hidden = self.forward(tokens, cache, Phase::Decode, 0)?.ok_or(ModelError::EmptyPrompt)?;
        Ok(self.head.forward(&hidden)?.squeeze(1)?.to_dtype(DType::F32)?)
    }

    /// All layers over tokens `(batch, len)`; returns the normed hidden states of positions `from..`, if any.
    fn forward(&self, tokens: &Tensor, cache: &mut KvCache, phase: Phase, from: usize) -> Result<Option<Tensor>> {
        let (_, len) = tokens.dims2()?;
        let rows = self.rope.rows(cache.len(), len)?;
        let mut x = self.embedding.forward(&tokens.contiguous()?)?;
        for layer in &self.layers {
            x = layer.forward(x, &rows, cache, phase)?;
        }
        cache.advance(len);
        if from == len {
            return Ok(None);
        }
        Ok(Some(self.norm.forward(&x.narrow(1, from, len - from)?.contiguous()?)?))
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
        // On a GPU an id outside the embedding would read foreign memory in silence.
        let largest = tokens.flatten_all()?.max(0)?.to_scalar::<u32>()?;
        if largest as usize >= self.config.vocab_size {
            return Err(ModelError::TokenOutOfRange { expected: self.config.vocab_size, got: largest });
        }
        Ok((batch, len))
    }
}

#[derive(Debug)]
struct Layer {
    input_norm: RmsNorm,
    attention: SelfAttention,
    post_norm: RmsNorm,
    mlp: Mlp,
}

impl Layer {
    fn load(config: &DecoderConfig, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let norm = |name: &str| load_norm(config.hidden_size, config.rms_norm_eps, &vb.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: SelfAttention::load(config, layer, &vb.pp("self_attn"))?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(config, &vb.pp("mlp"))?,
        })
    }

    fn forward(&self, x: Tensor, rows: &(Tensor, Tensor), cache: &mut KvCache, phase: Phase) -> Result<Tensor> {
        let attended = {
            let _span = tracing::debug_span!("attention", layer = self.attention.layer()).entered();
            self.attention.forward(&self.input_norm.forward(&x)?, rows, cache, phase)?
        };
        let x = (x + attended)?;
        let _span = tracing::debug_span!("mlp", layer = self.attention.layer()).entered();
        let mixed = self.mlp.forward(&self.post_norm.forward(&x)?)?;
        Ok((x + mixed)?)
    }
}

#[derive(Debug)]
struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    rows_at_a_time: usize,
}

impl Mlp {
    fn load(config: &DecoderConfig, vb: &VarBuilder) -> Result<Self> {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        Ok(Self {
            gate: load_linear(hidden, inner, bias, &vb.pp("gate_proj"))?,
            up: load_linear(hidden, inner, bias, &vb.pp("up_proj"))?,
            down: load_linear(inner, hidden, bias, &vb.pp("down_proj"))?,
            rows_at_a_time: (MLP_ELEMENTS / inner).max(64),
        })
    }

    /// In slices, because a whole chunk's intermediate is several times the residual stream.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, len, hidden) = x.dims3()?;
        let x = x.reshape((batch * len, hidden))?;
        let slices = (0..batch * len)
            .step_by(self.rows_at_a_time)
            .map(|start| {
                let x = x.narrow(0, start, self.rows_at_a_time.min(batch * len - start))?;
                let inner = (self.gate.forward(&x)?.silu()? * self.up.forward(&x)?)?;
                Ok(self.down.forward(&inner)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let out = if slices.len() == 1 { slices[0].clone() } else { Tensor::cat(&slices, 0)? };
        Ok(out.reshape((batch, len, hidden))?)
    }
}
