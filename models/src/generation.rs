//! Token by token generation.

use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use candle_s2o::Attention;

use crate::decoder::Decoder;
use crate::error::{ModelError, Result};
#[cfg(feature = "cuda")]
use crate::fused::Likeliest;
use crate::kv_cache::KvCache;
use crate::model::LoadedModel;
use crate::prefill::PrefillOptions;
use crate::sampling::Sampler;
use crate::text_stream::TextStream;

pub use crate::sampling::GenerationOptions;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model emitted an end token.
    Eos,
    /// `max_new_tokens` tokens were generated.
    Length,
}

/// An iterator over generated tokens of one sequence. End tokens are not yielded.
///
/// A token is in the cache once the next token is requested, so the last token needs no forward pass. From the second token on,
/// a single GPU that chooses the likeliest token computes the next logits while the host reads the token. After an end token,
/// or if no other token is requested, they are discarded, and dropping the stream waits for them.
pub struct TokenStream<'m> {
    decoder: &'m Decoder,
    cache: &'m mut KvCache,
    eos_ids: &'m [u32],
    sampler: Sampler,
    context: Vec<u32>,
    logits: Tensor,
    pending: Option<Pending>,
    #[cfg(feature = "cuda")]
    on_gpu: Option<Likeliest>,
    generated: usize,
    stopped: Option<StopReason>,
    failed: bool,
}

/// The token that was generated last.
struct Pending {
    token: u32,
    /// Logits after the token, if it was decoded before the host knew it. The cache does not count its position yet.
    logits: Option<Tensor>,
}

impl<'m> TokenStream<'m> {
    /// Continues a prefill: `logits` `(1, vocab_size)` are those of the prompt's last position, `cache` holds the
    /// prompt, and `prompt` serves only for the repeat penalty.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] for a batch other than 1 or invalid options; [`ModelError::NotFinite`] if the logits
    /// are NaN or infinite.
    pub fn new(
        decoder: &'m Decoder,
        cache: &'m mut KvCache,
        logits: &Tensor,
        prompt: &[u32],
        eos_ids: &'m [u32],
        options: &GenerationOptions,
    ) -> Result<Self> {
        if logits.dims() != [1, decoder.config().vocab_size] {
            let expected = format!("[1, {}]", decoder.config().vocab_size);
            return Err(ModelError::input("logits to generate from", expected, format!("{:?}", logits.dims())));
        }
        options.check()?;
        cache.check_logits(logits)?;
        let context = prompt[prompt.len().saturating_sub(options.repeat_last_n)..].to_vec();
        let sampler = Sampler::new(options.clone());
        let logits = logits.squeeze(0)?.to_dtype(DType::F32)?.contiguous()?;
        Ok(Self {
            decoder,
            cache,
            eos_ids,
            #[cfg(feature = "cuda")]
            on_gpu: (sampler.is_greedy() && logits.device().is_cuda() && logits.device().same_device(decoder.device()))
                .then(|| Likeliest::new(decoder.device()))
                .transpose()?,
            sampler,
            context,
            logits,
            pending: None,
            generated: 0,
            stopped: None,
            failed: false,
        })
    }

    /// Why the stream ended, once it has.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stopped
    }

    fn step(&mut self) -> Result<Option<u32>> {
        if self.generated == self.sampler.options.max_new_tokens {
            self.stopped = Some(StopReason::Length);
            return Ok(None);
        }
        match self.pending.take() {
            Some(Pending { logits: Some(logits), .. }) => {
                self.cache.advance(1);
                self.logits = logits;
            }
            Some(Pending { token, logits: None }) => {
                self.logits = self.decoder.decode_ids(&[token], self.cache)?.squeeze(0)?;
            }
            None => {}
        }
        let chosen = self.choose()?;
        let token = chosen.token;
        if self.eos_ids.contains(&token) {
            self.stopped = Some(StopReason::Eos);
            return Ok(None);
        }
        self.context.push(token);
        self.pending = Some(chosen);
        self.generated += 1;
        Ok(Some(token))
    }

    /// The next token by the logits, which must be finite.
    fn choose(&mut self) -> Result<Pending> {
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = &mut self.on_gpu {
            let token = on_gpu.choose(&self.logits)?;
            // The first token does not wait until the host has enqueued what follows it. Several ranks: not tried.
            let is_inner = (1..self.sampler.options.max_new_tokens - 1).contains(&self.generated);
            let logits = match is_inner && self.decoder.parallel().is_none() {
                true => self.decoder.decode_ahead(&token, self.cache),
                false => None,
            };
            if let Some(token) = on_gpu.read()? {
                return Ok(Pending { token, logits });
            }
        }
        self.cache.check_logits(&self.logits)?;
        let recent = self.context.len().saturating_sub(self.sampler.options.repeat_last_n);
        let token = self.sampler.sample(&self.logits, &self.context[recent..])?;
        Ok(Pending { token, logits: None })
    }
}

impl Iterator for TokenStream<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.stopped.is_some() || self.failed {
            return None;
        }
        let item = self.step().transpose();
        self.failed = matches!(item, Some(Err(_)));
        item
    }
}

/// Output and times of [`LoadedModel::generate`].
#[derive(Debug, Clone)]
pub struct Generated {
    /// The new tokens, end token excluded.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why the generation ended.
    pub stop: StopReason,
    /// Wall time of the prefill.
    pub prefill_time: Duration,
    /// Wall time after the prefill.
    pub decode_time: Duration,
}

impl LoadedModel {
    /// Prefills `prompt` with `method` after the contents of `cache`, then generates. `on_text` gets the text piece
    /// by piece.
    ///
    /// # Errors
    /// As [`Decoder::prefill`] and [`Decoder::decode`]; [`ModelError::CacheFull`] and [`ModelError::ContextTooLong`]
    /// come before any work if prompt and new tokens together do not fit.
    pub fn generate(
        &self,
        prompt: &[u32],
        cache: &mut KvCache,
        method: &dyn Attention,
        prefill: PrefillOptions,
        options: &GenerationOptions,
        on_text: &mut dyn FnMut(&str),
    ) -> Result<Generated> {
        options.check()?;
        let tokens = self.prompt(prompt)?;
        // The last new token is never fed back.
        let room = prompt.len().saturating_add(options.max_new_tokens.saturating_sub(1));
        let (got, expected) = (cache.len().saturating_add(room), self.config().max_positions);
        if got > expected {
            return Err(ModelError::ContextTooLong { expected, got });
        }
        cache.check_room(room)?;
        let start = Instant::now();
        let logits = self.decoder.prefill(&tokens, cache, method, prefill)?.last_logits()?;
        self.decoder.device().synchronize()?;
        let prefill_time = start.elapsed();

        let start = Instant::now();
        let mut stream = TokenStream::new(&self.decoder, cache, &logits, prompt, &self.eos_ids, options)?;
        let mut text_stream = TextStream::new(&self.tokenizer);
        let (mut tokens, mut text) = (Vec::new(), String::new());
        let mut show = |piece: String| {
            if !piece.is_empty() {
                on_text(&piece);
                text.push_str(&piece);
            }
        };
        for token in stream.by_ref() {
            let token = token?;
            tokens.push(token);
            show(text_stream.push(token)?);
        }
        show(text_stream.finish()?);
        let stop = stream.stop_reason().unwrap_or(StopReason::Length);
        Ok(Generated { tokens, text, stop, prefill_time, decode_time: start.elapsed() })
    }
}
