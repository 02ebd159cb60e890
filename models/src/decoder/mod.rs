//! The decoder: its weights, the forward pass, and dense decoding token by token.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;

use crate::attention::Phase;
use crate::config::DecoderConfig;
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Need, Result};
use crate::fused::{Linear, LinearPrecision, Rotary};
use crate::kv_cache::{KvCache, KvStorage};
use crate::layers::{Embedding, Norm, Quantised, Residual, Weights};
use crate::parallel::Parallel;

mod checks;
mod layer;

pub(crate) use checks::check_dtype;
use checks::check_linear_precision;
use layer::Layer;

/// Called with the number of tokens (or layers) done and their total.
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// How [`Decoder::load_with`] holds and shares the weights.
#[derive(Debug, Clone, Default)]
pub struct DecoderOptions {
    /// Precision of the linear layers.
    pub linear: LinearPrecision,
    /// Precision and place of the KV caches.
    pub kv: KvStorage,
    /// The ranks that run the decoder together; `None` for one device.
    pub parallel: Option<Parallel>,
}

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
    kv: KvStorage,
    precision: String,
    weight_bytes: u64,
    device: Device,
    parallel: Option<Parallel>,
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
        Self::load_with(config, vb, DecoderOptions::default(), progress)
    }

    /// [`Self::load`] with options. With ranks, it loads this rank's part of a decoder that they run together: in tensor
    /// parallelism each rank reads all weights from `vb`, one layer at a time, and keeps its part. A
    /// [`ModelSource`](crate::ModelSource) in safetensors files reads only its parts of the layers' matrices. Every rank
    /// has embedding and output head whole.
    ///
    /// # Errors
    /// Those of [`Self::load`]; [`ModelError::Int8Linear`] where linear layers cannot be in int8; [`ModelError::WrongInput`] if
    /// the number of ranks divides the KV heads or the MLP unevenly; [`ModelError::Ranks`] if a rank has another model
    /// or is lost.
    pub fn load_with(
        config: &DecoderConfig,
        vb: &VarBuilder,
        options: DecoderOptions,
        progress: Option<&mut Progress>,
    ) -> Result<Self> {
        let none = Quantised::new();
        Self::from_weights(
            config,
            &Weights::new(vb.clone(), &none, options.linear),
            options.kv,
            options.parallel,
            progress,
        )
    }

    /// [`Self::load`] from weights of which some stay quantised.
    pub(crate) fn from_weights(
        config: &DecoderConfig,
        weights: &Weights,
        kv: KvStorage,
        parallel: Option<Parallel>,
        progress: Option<&mut Progress>,
    ) -> Result<Self> {
        let config = config.clone().checked("DecoderConfig")?;
        check_dtype(weights.dtype())?;
        check_linear_precision(&config, weights)?;
        let parallel = parallel.map(|parallel| parallel.checked(&config, weights)).transpose()?;
        // Activations are freed after every layer, and freed memory would leave the process whenever the host waits.
        DeviceMemory::keep_released(weights.device())?;
        let need = Need {
            what: "holding the weights",
            bytes: weights.bytes(&config),
            way_out: "take a smaller model, a GPU with more memory, or bf16 or f16 instead of f32",
        };
        let decoder = need.check(Self::load_all(config, weights, parallel, progress), weights.device())?;
        Ok(Self { kv, ..decoder })
    }

    fn load_all(
        config: DecoderConfig,
        weights: &Weights,
        parallel: Option<Parallel>,
        mut progress: Option<&mut Progress>,
    ) -> Result<Self> {
        let model = weights.pp("model");
        let embedding = Embedding::load(&config, &model.pp("embed_tokens"))?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            layers.push(Layer::load(&config, layer, &model.pp(format!("layers.{layer}")), parallel.as_ref())?);
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
        let norm = Norm::load(config.hidden_size, config.rms_norm_eps, &model.pp("norm"))?;
        if let Some(parallel) = &parallel {
            parallel.check_weights(norm.weight())?;
        }
        Ok(Self {
            norm,
            rotary: Rotary::new(frequencies, factor, weights.dtype(), weights.device())?,
            dtype: weights.dtype(),
            kv: KvStorage::default(),
            precision: weights.precision(),
            weight_bytes: weights.bytes(&config),
            device: weights.device().clone(),
            config,
            embedding,
            layers,
            head,
            parallel,
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

    /// The dtype, the types of quantised weights, and the precision of caches, if it is another one: `bf16`, `bf16 with
    /// Q4K and Q6K weights`, or `bf16, KV cache in 8 bits`.
    pub fn precision(&self) -> String {
        self.precision_with(self.kv)
    }

    /// [`Self::precision`] with a cache in the given precision ([`Self::new_cache_in`]).
    pub fn precision_with(&self, kv: KvStorage) -> String {
        let weights = &self.precision;
        match kv {
            KvStorage::AsComputed => weights.clone(),
            KvStorage::Int8 => format!("{weights}, KV cache in 8 bits"),
            KvStorage::Host => format!("{weights}, KV cache in host memory"),
        }
    }

    /// Precision and place of new caches.
    pub fn kv_storage(&self) -> KvStorage {
        self.kv
    }

    /// Memory of the model's weights in bytes; several ranks hold them together.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// The device of the weights and of the computation.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The ranks that run this decoder together, if there are several.
    pub fn parallel(&self) -> Option<&Parallel> {
        self.parallel.as_ref()
    }

    /// A cache for `batch` sequences of up to `capacity` positions, in this decoder's precision of caches and on its
    /// device, for this rank's heads.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn new_cache(&self, batch: usize, capacity: usize) -> Result<KvCache> {
        self.new_cache_in(self.kv, batch, capacity)
    }

    /// [`Self::new_cache`] in another precision or place.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn new_cache_in(&self, storage: KvStorage, batch: usize, capacity: usize) -> Result<KvCache> {
        KvCache::new(&self.own_config(), batch, capacity, self.dtype, storage, &self.device)
    }

    /// The memory of [`Self::new_cache`], in bytes.
    pub fn cache_bytes(&self, batch: usize, capacity: usize) -> u64 {
        KvCache::bytes(&self.own_config(), batch, capacity, self.dtype, self.kv)
    }

    /// The shape with this rank's KV heads.
    fn own_config(&self) -> DecoderConfig {
        DecoderConfig { num_kv_heads: self.own_kv_heads(), ..self.config.clone() }
    }

    /// The KV heads of this rank.
    fn own_kv_heads(&self) -> usize {
        self.config.num_kv_heads / self.parallel.as_ref().map_or(1, Parallel::world_size)
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
        self.decode_checked(batch, tokens, cache)
    }

    /// [`Self::decode`] of token ids on the host, one per sequence. On a GPU the host waits for nothing.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_ids(&self, ids: &[u32], cache: &mut KvCache) -> Result<Tensor> {
        self.check_shape(ids.len(), 1, cache)?;
        self.check_ids(ids)?;
        let tokens = Tensor::from_slice(ids, (ids.len(), 1), &self.device)?;
        self.decode_checked(ids.len(), &tokens, cache)
    }

    /// The logits `(vocab_size,)` after a token of one sequence, `(1, 1)`, that was chosen among logits of this decoder. The
    /// cache does not count its position yet ([`KvCache::advance`]). `None` if they cannot be computed: decoding the token
    /// again says why.
    #[cfg(feature = "cuda")]
    pub(crate) fn decode_ahead(&self, token: &Tensor, cache: &mut KvCache) -> Option<Tensor> {
        self.check_shape(1, 1, cache).ok()?;
        let len = cache.len();
        let logits = self.decode_checked(1, token, cache);
        cache.set_len(len).and(logits).ok()?.squeeze(0).ok()
    }

    fn decode_checked(&self, batch: usize, tokens: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
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
        let (batch, len) = tokens.dims2()?;
        let shards = match (phase, &self.parallel) {
            (Phase::Prefill { .. }, Some(parallel)) => parallel.shards(batch, len),
            _ => None,
        };
        let own = shards.map_or(0..len, |shards| shards.own());
        let rotation = self.rotary.rows(cache.len(), len)?;
        let own_tokens = tokens.narrow(1, own.start, own.len())?.contiguous()?;
        let mut residual = Residual::from(self.embedding.forward(&own_tokens, self.dtype)?);
        let first = self.first_of_last_layer(cache.len(), len, phase, from);
        for (index, layer) in self.layers.iter().enumerate() {
            let first = if index + 1 == self.layers.len() { first } else { 0 };
            match layer.forward(residual, &rotation, cache, phase, shards, first)? {
                Some(after) => residual = after,
                None => {
                    cache.advance(len);
                    return Ok(None);
                }
            }
        }
        cache.advance(len);
        if from == len {
            return Ok(None);
        }
        let normed = |rows: Range<usize>| -> Result<Tensor> {
            let last = |x: &Tensor| x.narrow(1, rows.start, rows.len())?.contiguous();
            let (sum, delta) = (last(&residual.sum)?, residual.delta.as_ref().map(last).transpose()?);
            Ok(self.norm.forward(Residual { sum, delta })?.1)
        };
        match shards {
            Some(shards) if first == 0 => shards.gather(from, &residual.sum, normed).map(Some),
            _ => normed(from - first..len - first).map(Some),
        }
    }

    /// The first of a chunk's `len` positions whose output the last layer computes. Those before it leave only their
    /// keys and values there, if the outputs of positions `from..` do not depend on them. `before` positions are in the
    /// cache.
    fn first_of_last_layer(&self, before: usize, len: usize, phase: Phase, from: usize) -> usize {
        let (Phase::Prefill { method, prompt_len }, Some(layer)) = (phase, self.layers.last()) else { return 0 };
        let independent = method.independent_queries(&layer.attention.call(prompt_len));
        // Of a chunk without wanted positions, only a method that looks at all queries needs outputs.
        let wanted = if from == len { 1 } else { prompt_len.saturating_sub(before + from) };
        if wanted <= independent { from } else { 0 }
    }
}
