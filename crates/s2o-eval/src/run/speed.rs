//! [`Speed`]: the measured speed of a model on its device, from which the time of other prompts is estimated.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use candle_core::{DType, Result as CandleResult, Tensor};
use candle_s2o::{Attention, Dense, PrefillCall};
use s2o_models::KvCache;

use super::answers;
use super::runner::Runner;
use crate::error::Result;

/// Tokens of the first measured prompt. The length doubles until a prefill takes [`LONG_ENOUGH`].
const FIRST_TOKENS: usize = 256;
/// A prefill of this time is hardly affected by the start of kernels and threads.
const LONG_ENOUGH: Duration = Duration::from_secs(1);
/// Decoding steps that are timed, after one that is not.
const STEPS: u32 = 4;

/// The times of one prefill with exact attention and of the decoding steps after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Tokens of the prefill.
    pub tokens: usize,
    /// Its time outside attention, in seconds: nearly all of it is in linear layers.
    pub linear_seconds: f64,
    /// Its time in attention, in seconds.
    pub attention_seconds: f64,
    /// Time of a decoding step for one sequence, in seconds: that of several sequences, divided by their number.
    pub step_seconds: f64,
    /// Bytes of weights that a step reads for one sequence: those of the model, divided by the number of sequences.
    pub weights: u64,
    /// Bytes of the KV cache for one token.
    pub kv: f64,
}

/// Estimated times in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Time {
    /// Prefills outside attention.
    pub linear: f64,
    /// Attention of the prefills.
    pub attention: f64,
    /// Decoding of the answers.
    pub answers: f64,
    /// Making of the prompts, before the prefills.
    pub prompts: f64,
}

impl Time {
    /// The sum of the parts.
    pub fn total(self) -> f64 {
        self.linear + self.attention + self.answers + self.prompts
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            linear: self.linear + other.linear,
            attention: self.attention + other.attention,
            answers: self.answers + other.answers,
            prompts: self.prompts + other.prompts,
        }
    }
}

impl Speed {
    /// The time of `count` prefills of `tokens` tokens with exact attention, each with an answer of `answer_tokens`
    /// tokens. The operations of linear layers are proportional to the tokens, and those of attention to their square.
    /// A decoding step takes as long as reading the weights and the KV cache, relative to the measured step.
    pub fn of(&self, tokens: usize, answer_tokens: usize, count: usize) -> Time {
        let count = count as f64;
        let longer = tokens as f64 / self.tokens as f64;
        let bytes = |tokens: usize| self.weights as f64 + self.kv * tokens as f64;
        let step = self.step_seconds * bytes(tokens) / bytes(self.tokens);
        Time {
            linear: count * self.linear_seconds * longer,
            attention: count * self.attention_seconds * longer * longer,
            answers: count * step * answer_tokens as f64,
            prompts: 0.0,
        }
    }
}

/// Exact attention that adds up its time.
#[derive(Debug, Default)]
struct TimedDense(Mutex<Duration>);

impl Attention for TimedDense {
    fn name(&self) -> &str {
        Dense.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> CandleResult<Tensor> {
        q.device().synchronize()?;
        let start = Instant::now();
        let out = Dense.prefill(call, q, k, v)?;
        q.device().synchronize()?;
        *self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += start.elapsed();
        Ok(out)
    }

    fn independent_queries(&self, call: &PrefillCall) -> usize {
        Dense.independent_queries(call)
    }
}

impl Runner<'_> {
    /// Times prefills of made-up tokens with exact attention, of 256 tokens and then of twice as many each time, until
    /// one takes a second or the next would have more than `longest` tokens. Then times a few decoding steps. The last
    /// prefill counts, so that the start of a GPU is not measured unless there is only one.
    ///
    /// # Errors
    /// Errors of the model.
    pub fn speed(&self, longest: usize) -> Result<Speed> {
        let decoder = &self.model.decoder;
        let vocabulary = decoder.config().vocab_size;
        let mut tokens = FIRST_TOKENS.min(longest).max(1);
        loop {
            // Any ids will do: the time of exact attention does not depend on them.
            let prompt: Vec<u32> = (0..tokens).map(|i| (i * 7919 % vocabulary) as u32).collect();
            let room = (tokens + 1).min(decoder.config().max_positions);
            let sequences = self.together(room)?.min(self.variants()).max(1);
            let mut cache = decoder.new_cache(sequences, room)?;
            let chunk = decoder.chunk_tokens(self.first_chunk(), 1)?;
            let attention = TimedDense::default();
            let start = Instant::now();
            answers::forward(self.model, &prompt, &mut cache.sequences(0..1)?, &attention, chunk)?;
            let whole = start.elapsed();
            if whole < LONG_ENOUGH && 2 * tokens <= longest {
                tokens *= 2;
                continue;
            }
            let attention = attention.0.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            return Ok(Speed {
                tokens,
                linear_seconds: whole.saturating_sub(attention).as_secs_f64(),
                attention_seconds: attention.as_secs_f64(),
                step_seconds: self.step(&mut cache, room - 1)?.as_secs_f64() / sequences as f64,
                weights: decoder.weight_bytes() / sequences as u64,
                kv: self.cache_bytes(1) as f64,
            });
        }
    }

    /// The mean time of decoding steps after `positions` positions of all sequences.
    fn step(&self, cache: &mut KvCache, positions: usize) -> Result<Duration> {
        let decoder = &self.model.decoder;
        let token = Tensor::zeros((cache.batch(), 1), DType::U32, decoder.device())?;
        let mut start = Instant::now();
        for step in 0..=STEPS {
            cache.set_len(positions)?;
            decoder.decode(&token, cache)?;
            decoder.device().synchronize()?;
            if step == 0 {
                start = Instant::now();
            }
        }
        Ok(start.elapsed() / STEPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: Speed =
        Speed { tokens: 1000, linear_seconds: 2.0, attention_seconds: 0.5, step_seconds: 0.1, weights: 3000, kv: 1.0 };

    #[test]
    fn linear_layers_grow_with_the_tokens_and_attention_with_their_square() {
        let same = MEASURED.of(1000, 0, 1);
        assert_eq!((same.linear, same.attention, same.answers), (2.0, 0.5, 0.0));
        let longer = MEASURED.of(8000, 0, 3);
        assert_eq!((longer.linear, longer.attention), (3.0 * 16.0, 3.0 * 32.0));
        assert_eq!(longer.total(), 144.0);
    }

    #[test]
    fn a_step_reads_weights_and_cache() {
        // 4000 bytes were read in the measured step, 6000 are after 3000 tokens.
        let time = MEASURED.of(3000, 10, 2);
        assert!((time.answers - 2.0 * 10.0 * 0.15).abs() < 1e-12, "{time:?}");
    }
}
