//! Token by token generation.

use std::time::{Duration, Instant};

use candle_core::Tensor;
use candle_s2o::Attention;

use crate::decoder::Decoder;
use crate::error::{ModelError, Result};
use crate::kv_cache::KvCache;
use crate::model::LoadedModel;
use crate::prefill::PrefillOptions;
use crate::sampling::{Sampler, likeliest};
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
/// A token is decoded only when the next token is requested, so the last token needs no forward pass.
pub struct TokenStream<'m> {
    decoder: &'m Decoder,
    cache: &'m mut KvCache,
    eos_ids: &'m [u32],
    sampler: Sampler,
    context: Vec<u32>,
    logits: Tensor,
    pending: Option<u32>,
    generated: usize,
    stopped: Option<StopReason>,
    failed: bool,
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
        Ok(Self {
            decoder,
            cache,
            eos_ids,
            sampler: Sampler::new(options.clone()),
            context,
            logits: logits.squeeze(0)?,
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
        if let Some(token) = self.pending.take() {
            self.logits = self.decoder.decode_ids(&[token], self.cache)?.squeeze(0)?;
        }
        let token = self.choose()?;
        if self.eos_ids.contains(&token) {
            self.stopped = Some(StopReason::Eos);
            return Ok(None);
        }
        self.context.push(token);
        self.pending = Some(token);
        self.generated += 1;
        Ok(Some(token))
    }

    /// The next token by the logits, which must be finite. The greedy choice reads their sum with it, because every read
    /// makes the host wait for the device.
    fn choose(&mut self) -> Result<u32> {
        if self.sampler.is_greedy() {
            let (token, sum) = likeliest(&self.logits)?;
            if sum.is_finite() {
                return Ok(token);
            }
        }
        self.cache.check_logits(&self.logits)?;
        let recent = self.context.len().saturating_sub(self.sampler.options.repeat_last_n);
        self.sampler.sample(&self.logits, &self.context[recent..])
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
