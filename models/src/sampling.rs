//! The choice of the next token from its logits: repeat penalty, temperature, top-k and top-p.
//!
//! Equal seeds give the tokens of `candle_transformers::generation::LogitsProcessor`, which `tests/models/sampling.rs`
//! checks. A dependency on candle-transformers would cost minutes of compile time.

use std::collections::HashSet;

use candle_core::{Error, Tensor};
use candle_nn::ops::softmax_last_dim;
use rand::SeedableRng;
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;

use crate::error::{ModelError, Result};

/// Below this temperature the most likely token is taken.
const MIN_TEMPERATURE: f64 = 1e-7;

/// Options for the choice of tokens and the end of a generation. Names and defaults are those of Candle's examples,
/// except the temperature: the default is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationOptions {
    /// Largest number of new tokens.
    pub max_new_tokens: usize,
    /// `None` or 0 takes the most likely token.
    pub temperature: Option<f64>,
    /// Samples only among the `k` most likely tokens.
    pub top_k: Option<usize>,
    /// Samples among the most likely tokens that together reach this probability.
    pub top_p: Option<f64>,
    /// Seed of the sampler.
    pub seed: u64,
    /// Penalty on recent tokens; 1 is none.
    pub repeat_penalty: f32,
    /// Number of recent tokens that are penalised.
    pub repeat_last_n: usize,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            temperature: None,
            top_k: None,
            top_p: None,
            seed: 299_792_458,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
        }
    }
}

impl GenerationOptions {
    /// Refuses invalid options, which would otherwise silently act as others. The errors name them as the options of
    /// Candle's examples, such as `top-p`.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`].
    pub fn check(&self) -> Result<()> {
        Err(match (self.temperature, self.top_k, self.top_p) {
            (Some(t), ..) if !(t.is_finite() && t >= 0.0) => {
                ModelError::input("temperature", "a finite number >= 0", t)
            }
            (_, Some(0), _) => ModelError::input("top-k", "at least 1", 0),
            (.., Some(p)) if !(p > 0.0 && p <= 1.0) => ModelError::input("top-p", "a number in (0, 1]", p),
            _ if !(self.repeat_penalty.is_finite() && self.repeat_penalty > 0.0) => {
                ModelError::input("repeat-penalty", "a finite number > 0", self.repeat_penalty)
            }
            _ => return Ok(()),
        })
    }
}

/// Chooses tokens one by one, with one random state.
pub(crate) struct Sampler {
    rng: StdRng,
    pub(crate) options: GenerationOptions,
}

impl Sampler {
    /// `options` must be valid.
    pub(crate) fn new(options: GenerationOptions) -> Self {
        Self { rng: StdRng::seed_from_u64(options.seed), options }
    }

    /// Whether the choice is the most likely token, without a penalty.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_greedy(&self) -> bool {
        self.options.repeat_penalty == 1.0 && self.temperature().is_none()
    }

    /// `None` takes the most likely token.
    fn temperature(&self) -> Option<f64> {
        self.options.temperature.filter(|temperature| *temperature >= MIN_TEMPERATURE)
    }

    /// Samples the next token from f32 logits `(vocab_size,)`, after the penalty on the `recent` tokens.
    pub(crate) fn sample(&mut self, logits: &Tensor, recent: &[u32]) -> Result<u32> {
        let logits = self.penalise(logits.clone(), recent)?;
        let Some(temperature) = self.temperature() else {
            return likeliest(&logits);
        };
        let mut weights = softmax_last_dim(&(logits / temperature)?)?.to_vec1::<f32>()?;
        let mut tokens: Vec<usize> = (0..weights.len()).collect();
        if let Some(k) = self.options.top_k.filter(|k| *k < weights.len()) {
            tokens.select_nth_unstable_by(k, |a, b| weights[*b].total_cmp(&weights[*a]));
            tokens.truncate(k);
            weights = tokens.iter().map(|token| weights[*token]).collect();
        }
        if let Some(p) = self.options.top_p.filter(|p| *p < 1.0) {
            keep_top_p(&mut weights, p as f32);
        }
        let choice = WeightedIndex::new(&weights).map_err(Error::wrap)?;
        Ok(tokens[choice.sample(&mut self.rng)] as u32)
    }

    /// Lowers the logit of each `recent` token once, however often it occurs.
    fn penalise(&self, logits: Tensor, recent: &[u32]) -> Result<Tensor> {
        let penalty = self.options.repeat_penalty;
        if penalty == 1.0 {
            return Ok(logits);
        }
        let mut values = logits.to_vec1::<f32>()?;
        for token in recent.iter().collect::<HashSet<_>>() {
            if let Some(value) = values.get_mut(*token as usize) {
                *value = if *value >= 0.0 { *value / penalty } else { *value * penalty };
            }
        }
        Ok(Tensor::from_vec(values, logits.shape(), logits.device())?)
    }
}

/// The place of the largest of the f32 logits `(vocab_size,)`, of equal ones the first.
fn likeliest(logits: &Tensor) -> Result<u32> {
    let logits = logits.to_vec1::<f32>()?;
    Ok((0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best }) as u32)
}

/// Keeps the fewest largest weights whose sum reaches `p`; sets the others to 0.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_logits_the_first_is_the_likeliest() {
        let chosen = |logits: &[f32]| likeliest(&Tensor::new(logits, &candle_core::Device::Cpu).unwrap()).unwrap();
        assert_eq!(chosen(&[1.0, 3.0, -2.0, 3.0]), 1);
        assert_eq!(chosen(&[-2.0, -1.0]), 1);
    }

    #[test]
    fn a_share_that_is_reached_exactly_takes_no_more() {
        for (p, kept) in [(0.5, [0.5, 0.0, 0.0]), (0.75, [0.5, 0.25, 0.0]), (0.76, [0.5, 0.25, 0.25])] {
            let mut weights = [0.5, 0.25, 0.25];
            keep_top_p(&mut weights, p);
            assert_eq!(weights, kept, "{p}");
        }
    }
}
