//! The choice of the next token from its logits: repeat penalty, temperature, top-k and top-p.
//!
//! The tokens are those of `candle_transformers::generation::LogitsProcessor` for the same seed, which
//! `tests/models/sampling.rs` checks: a dependency on candle-transformers costs minutes of compile time.

use std::collections::HashSet;

use candle_core::{D, DType, Error, Tensor};
use candle_nn::ops::softmax_last_dim;
use rand::SeedableRng;
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;

use crate::error::Result;
use crate::generation::GenerationOptions;

/// Below this temperature the likeliest token is taken.
const MIN_TEMPERATURE: f64 = 1e-7;

/// Chooses tokens one after the other, with one random state.
pub(crate) struct Sampler {
    rng: StdRng,
    /// `None`: the likeliest token.
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    repeat_penalty: f32,
}

impl Sampler {
    /// `options` are checked.
    pub(crate) fn new(options: &GenerationOptions) -> Self {
        Self {
            rng: StdRng::seed_from_u64(options.seed),
            temperature: options.temperature.filter(|temperature| *temperature >= MIN_TEMPERATURE),
            top_k: options.top_k,
            top_p: options.top_p.filter(|p| *p < 1.0).map(|p| p as f32),
            repeat_penalty: options.repeat_penalty,
        }
    }

    /// The next token by its logits `(vocab_size,)`, those of the `recent` tokens penalised.
    pub(crate) fn sample(&mut self, logits: &Tensor, recent: &[u32]) -> Result<u32> {
        let logits = self.penalise(logits.to_dtype(DType::F32)?, recent)?;
        let Some(temperature) = self.temperature else {
            return Ok(logits.argmax(D::Minus1)?.to_scalar()?);
        };
        let mut weights = softmax_last_dim(&(logits / temperature)?)?.to_vec1::<f32>()?;
        let mut tokens: Vec<usize> = (0..weights.len()).collect();
        if let Some(k) = self.top_k.filter(|k| *k < weights.len()) {
            tokens.select_nth_unstable_by(k, |a, b| weights[*b].total_cmp(&weights[*a]));
            tokens.truncate(k);
            weights = tokens.iter().map(|token| weights[*token]).collect();
        }
        if let Some(p) = self.top_p {
            keep_top_p(&mut weights, p);
        }
        let choice = WeightedIndex::new(&weights).map_err(Error::wrap)?;
        Ok(tokens[choice.sample(&mut self.rng)] as u32)
    }

    /// Each of the `recent` tokens gets a smaller logit, however often it occurs among them.
    fn penalise(&self, logits: Tensor, recent: &[u32]) -> Result<Tensor> {
        if self.repeat_penalty == 1.0 {
            return Ok(logits);
        }
        let mut values = logits.to_vec1::<f32>()?;
        for token in recent.iter().collect::<HashSet<_>>() {
            if let Some(value) = values.get_mut(*token as usize) {
                *value = if *value >= 0.0 { *value / self.repeat_penalty } else { *value * self.repeat_penalty };
            }
        }
        Ok(Tensor::from_vec(values, logits.shape(), logits.device())?)
    }
}

/// Sets all weights to 0 but the largest ones, the fewest whose sum reaches `p`.
fn keep_top_p(weights: &mut [f32], p: f32) {
    let mut descending: Vec<usize> = (0..weights.len()).collect();
    descending.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    let mut sum = 0.0;
    for index in descending {
        if sum >= p {
            weights[index] = 0.0;
        } else {
            sum += weights[index];
        }
    }
}
