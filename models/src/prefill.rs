//! Prefill: runs a prompt through the layers chunk by chunk, with any [`Attention`].

use std::fmt;

use candle_core::{DType, Tensor};
use candle_s2o::Attention;

use crate::attention::Phase;
use crate::chunk::{Chunk, activation_bytes};
use crate::decoder::{Decoder, Progress};
use crate::device_memory::DeviceMemory;
use crate::error::{ModelError, Need, Result};
use crate::kv_cache::KvCache;
use crate::parallel::Mode;

/// Options of [`Decoder::prefill`].
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

    /// Tokens per chunk, which bounds the activations for any prompt length: a number, [`Chunk::Auto`], or `None` for
    /// the whole prompt.
    #[must_use]
    pub fn chunk(mut self, chunk: impl Into<Chunk>) -> Self {
        self.chunk = chunk.into();
        self
    }

    /// Number of last positions that need logits: 1 to generate, more for perplexity. At most the prompt's length.
    #[must_use]
    pub fn num_logits(mut self, positions: usize) -> Self {
        self.num_logits = Some(positions);
        self
    }

    /// Sets a callback, called after each chunk with the tokens done and the total.
    #[must_use]
    pub fn on_progress(mut self, progress: &'a mut Progress<'a>) -> Self {
        self.progress = Some(progress);
        self
    }
}

/// The output of a prefill, in addition to the filled cache.
#[derive(Debug, Clone)]
pub struct PrefillOutput {
    /// Logits of the last positions, `(batch, num_logits, vocab_size)`, f32.
    pub logits: Tensor,
    /// Hidden state of the last position after the final norm, `(batch, hidden_size)`, f32.
    pub hidden: Tensor,
}

impl PrefillOutput {
    /// Logits of the last position, `(batch, vocab_size)`, f32, from which the first generated token is sampled.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] if the prefill computed no logits.
    pub fn last_logits(&self) -> Result<Tensor> {
        match self.logits.dim(1)? {
            0 => Err(ModelError::input("positions with logits", "at least 1", 0)),
            positions => Ok(self.logits.narrow(1, positions - 1, 1)?.squeeze(1)?),
        }
    }
}

impl Decoder {
    /// Current number of tokens per sequence of a chunk of `batch` sequences; `None` for the whole prompt. It depends
    /// on the free memory, so allocate the cache first. All ranks get the same number.
    ///
    /// # Errors
    /// If the driver cannot tell the free memory, or a rank is lost.
    pub fn chunk_tokens(&self, chunk: Chunk, batch: usize) -> Result<Option<usize>> {
        let mut memory = DeviceMemory::of(self.device())?;
        if let (Chunk::Auto, Some(parallel), Some(memory)) = (chunk, self.parallel(), &mut memory) {
            memory.free = parallel.least(memory.free)?;
        }
        let tokens = chunk.tokens(self.config(), self.dtype(), batch, memory);
        Ok(match (chunk, self.parallel()) {
            // Each has its shard of the activations.
            (Chunk::Auto, Some(parallel)) if parallel.mode() == Mode::Sequence => {
                tokens.map(|tokens| tokens * parallel.world_size())
            }
            _ => tokens,
        })
    }

    /// Runs prompt tokens `(batch, len)` u32 after the contents of the cache, chunk by chunk, with `method`.
    ///
    /// Only the activations of one chunk exist at a time, and the output head runs only on the positions whose logits
    /// are requested. After an error the cache has its previous length.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], [`ModelError::EmptyChunk`], [`ModelError::TokenOutOfRange`],
    /// [`ModelError::ContextTooLong`] (the model), [`ModelError::CacheFull`] (the cache), [`ModelError::WrongInput`]
    /// (rank or batch), [`ModelError::OutOfMemory`], and the errors of `method`.
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
            bytes: (batch * chunk) as u64 * activation_bytes(self.config(), self.dtype()),
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
            let hidden = need.check(hidden, self.device())?;
            if let Some(hidden) = hidden {
                if num_logits > 0 {
                    let rows = hidden.dim(1)?;
                    logits.push(self.logits_need(batch * rows).check(self.logits(&hidden), self.device())?);
                }
                last_hidden = Some(hidden);
            }
            if let Some(report) = options.progress.as_mut() {
                report(start + count, len);
            }
        }
        // The last chunk always yields hidden states, because at least one position is requested.
        let hidden = last_hidden.ok_or(ModelError::EmptyPrompt)?;
        let hidden = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?.to_dtype(DType::F32)?;
        let logits = match logits.len() {
            0 => Tensor::zeros((batch, 0, self.config().vocab_size), DType::F32, self.device())?,
            1 => logits.remove(0),
            _ => Tensor::cat(&logits, 1)?,
        };
        Ok(PrefillOutput { logits, hidden })
    }
}
