//! The decoder: its weights, the forward pass, and dense decoding token by token.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use crate::attention::{Phase, SelfAttention};
use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Need, Result};
use crate::fused::{Linear, Rotary, Rotation};
use crate::kv_cache::KvCache;
use crate::layers::{Embedding, Mlp, Norm, Quantised, Weights};

/// Called with the number of tokens (or layers) done and their total.
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// A Llama or Qwen3 decoder.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    rotary: Rotary,
    dtype: DType,
    precision: String,
    device: Device,
}

impl Decoder {
    /// Builds the decoder from weights under Hugging Face names, in the dtype and on the device of `vb`. `progress`
    /// runs after each layer.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::WrongShape`], [`ModelError::UnsupportedFeature`] (a dtype other
    /// than f32, bf16 and f16), [`ModelError::OutOfMemory`], or the error of reading a tensor.
    ///
    /// On a GPU, released memory stays with this process ([`DeviceMemory::keep_released`]), and the projections that
    /// share an input are joined in new tensors, one layer at a time. This adds the weights of one layer to the peak if
    /// `vb` reads files, and those of all layers if `vb` holds tensors on the GPU.
    pub fn load(config: &DecoderConfig, vb: &VarBuilder, progress: Option<&mut Progress>) -> Result<Self> {
        Self::from_weights(config, &Weights::new(vb.clone(), &Quantised::new()), progress)
    }

    /// [`Self::load`] from weights of which some stay quantised.
    pub(crate) fn from_weights(
        config: &DecoderConfig,
        weights: &Weights,
        progress: Option<&mut Progress>,
    ) -> Result<Self> {
        let config = config.clone().checked("DecoderConfig")?;
        check_dtype(weights.dtype())?;
        // Activations are freed after every layer, and every decoded token makes the host wait.
        DeviceMemory::keep_released(weights.device())?;
        let need = Need {
            what: "holding the weights",
            bytes: weights.bytes(&config),
            way_out: "take a smaller model, a GPU with more memory, or bf16 or f16 instead of f32",
        };
        need.check(Self::load_all(config, weights, progress), weights.device())
    }

    fn load_all(config: DecoderConfig, weights: &Weights, mut progress: Option<&mut Progress>) -> Result<Self> {
        let model = weights.pp("model");
        let embedding = Embedding::load(&config, &model.pp("embed_tokens"))?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            layers.push(Layer::load(&config, layer, &model.pp(format!("layers.{layer}")))?);
            if let Some(report) = progress.as_mut() {
                report(layer + 1, config.num_layers);
            }
        }
        let head = if config.tie_embeddings {
            embedding.tied_head()
        } else {
            weights.pp("lm_head").linear(config.hidden_size, config.vocab_size, false)?
        };
        let (frequencies, factor) = (config.rope.inverse_frequencies(config.head_dim), config.rope.attention_factor());
        Ok(Self {
            norm: Norm::load(config.hidden_size, config.rms_norm_eps, &model.pp("norm"))?,
            rotary: Rotary::new(frequencies, factor, weights.dtype(), weights.device())?,
            dtype: weights.dtype(),
            precision: weights.precision(),
            device: weights.device().clone(),
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

    /// Dtype of activations, cache, and weights that are not quantised.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dtype, and the types of quantised weights: `bf16`, or `bf16 with Q4K and Q6K weights`.
    pub fn precision(&self) -> &str {
        &self.precision
    }

    /// The device of the weights and of the computation.
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

    /// Runs one token per sequence, `(batch, 1)` u32, with dense attention; returns f32 logits `(batch, vocab_size)`.
    ///
    /// # Errors
    /// As [`Self::prefill`]; [`ModelError::WrongInput`] for more than one token per sequence.
    pub fn decode(&self, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let (batch, len) = self.check_tokens(tokens, cache)?;
        if len != 1 {
            return Err(ModelError::input("tokens per sequence in decoding", 1, len));
        }
        let mut logits = || -> Result<Tensor> {
            let hidden = self.forward(tokens, cache, Phase::Decode, 0)?.ok_or(ModelError::EmptyPrompt)?;
            Ok(self.logits(&hidden)?.squeeze(1)?)
        };
        self.logits_need(batch).check(logits(), &self.device)
    }

    /// Logits of hidden states `(batch, len, hidden_size)`, f32.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head.forward(hidden)?.to_dtype(DType::F32)?)
    }

    pub(crate) fn logits_need(&self, rows: usize) -> Need {
        let bytes = self.config.vocab_size * (self.dtype.size_in_bytes() + DType::F32.size_in_bytes());
        Need { what: "computing logits", bytes: (rows * bytes) as u64, way_out: "take fewer positions or sequences" }
    }

    /// Runs all layers over tokens `(batch, len)`; returns the normalised hidden states of positions `from..`, if any.
    pub(crate) fn forward(
        &self,
        tokens: &Tensor,
        cache: &mut KvCache,
        phase: Phase,
        from: usize,
    ) -> Result<Option<Tensor>> {
        let (_, len) = tokens.dims2()?;
        let rotation = self.rotary.rows(cache.len(), len)?;
        let mut x = self.embedding.forward(&tokens.contiguous()?, self.dtype)?;
        // The norm of the next layer adds the output of a layer to the residual stream, in the same pass.
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

    /// Checks that tokens `(batch, len)` fit the model and the cache; returns batch and length.
    pub(crate) fn check_tokens(&self, tokens: &Tensor, cache: &KvCache) -> Result<(usize, usize)> {
        let &[batch, len] = tokens.dims() else {
            return Err(ModelError::input("prompt tensor", "(batch, len)", format!("{:?}", tokens.dims())));
        };
        if batch == 0 || len == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        if batch != cache.batch() || cache.num_layers() != self.layers.len() {
            let expected = format!("{batch} and {}", self.layers.len());
            let got = format!("{} and {}", cache.batch(), cache.num_layers());
            return Err(ModelError::input("batch and layers of the KV cache", expected, got));
        }
        if tokens.dtype() != DType::U32 {
            return Err(ModelError::input("dtype of the tokens", "u32", format!("{:?}", tokens.dtype())));
        }
        let got = cache.len().saturating_add(len);
        if got > self.config.max_positions {
            return Err(ModelError::ContextTooLong { expected: self.config.max_positions, got });
        }
        cache.check_room(len)?;
        // On a GPU an id outside the embedding would silently read other memory. The check runs on the host, because
        // the ids are few and the driver would first have to compile Candle's reductions.
        let largest = tokens.flatten_all()?.to_vec1::<u32>()?.into_iter().max().unwrap_or(0);
        if largest as usize >= self.config.vocab_size {
            return Err(ModelError::TokenOutOfRange { expected: self.config.vocab_size, got: largest });
        }
        Ok((batch, len))
    }
}

/// Returns `dtype` if the decoder computes in it.
pub(crate) fn check_dtype(dtype: DType) -> Result<DType> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(dtype),
        other => Err(ModelError::unsupported("dtype", "f32, bf16 or f16", format!("{other:?}"))),
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
    fn load(config: &DecoderConfig, layer: usize, weights: &Weights) -> Result<Self> {
        let norm = |name: &str| Norm::load(config.hidden_size, config.rms_norm_eps, &weights.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: SelfAttention::load(config, layer, &weights.pp("self_attn"))?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(config, &weights.pp("mlp"))?,
        })
    }

    /// Adds `delta` of the previous layer to the residual stream `x`. Returns the stream after attention, and the
    /// output of the MLP that is still to be added.
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
