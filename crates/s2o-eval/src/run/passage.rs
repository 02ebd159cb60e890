//! [`Passage`]: a text whose perplexity is measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Tensor;
use candle_s2o::Attention;
use s2o_models::{KvCache, LoadedModel, PrefillOptions, passkey};

use super::outcome::SampleResult;
use crate::error::{EvalError, Result};

/// The beginning of a text, and the number of tokens at its end that the model has to predict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    /// Name of the text in tables.
    pub name: String,
    /// The text.
    pub text: Arc<str>,
    /// Number of tokens from the beginning of the text.
    pub context_tokens: usize,
    /// Number of tokens at the end whose perplexity is measured.
    pub last: usize,
}

impl Passage {
    /// The English text of needle-7m's recorded prompts.
    ///
    /// # Errors
    /// As [`passkey::haystack`].
    pub fn embedded(context_tokens: usize, last: usize) -> Result<Self> {
        Ok(Self { name: "perplexity".to_owned(), text: passkey::haystack()?.into(), context_tokens, last })
    }

    /// Identifies the passage among the samples of a run.
    pub fn id(&self) -> String {
        format!("{}-{}-last{}", self.name, self.context_tokens, self.last)
    }

    /// The first `context_tokens` tokens of the text.
    ///
    /// # Errors
    /// [`EvalError::WrongInput`] if the text is shorter, or if `last` is outside `1..context_tokens`.
    pub(super) fn encode(&self, model: &LoadedModel) -> Result<Vec<u32>> {
        let Self { context_tokens, last, .. } = *self;
        if !(1..context_tokens).contains(&last) {
            let (what, most) = ("tokens at the end whose perplexity counts", context_tokens.saturating_sub(1));
            return Err(EvalError::wrong(what, format!("1 to {most}"), last));
        }
        let mut tokens = model.encode(&self.text)?;
        if tokens.len() < context_tokens {
            let expected = format!("at least {context_tokens} tokens in {}", self.name);
            return Err(EvalError::wrong("text for perplexity", expected, tokens.len()));
        }
        tokens.truncate(context_tokens);
        Ok(tokens)
    }
}

/// Prefills all tokens except the last and compares the logits of the `last` positions with the tokens after them. The
/// time is that of the prefill.
///
/// # Errors
/// As [`s2o_models::Decoder::prefill`] and [`KvCache::check_logits`]; [`EvalError::WrongInput`] if the loss is not
/// finite.
pub(super) fn perplexity(
    model: &LoadedModel,
    tokens: &[u32],
    last: usize,
    cache: &mut KvCache,
    method: &dyn Attention,
    chunk: Option<usize>,
) -> Result<(SampleResult, Duration)> {
    let start = Instant::now();
    let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[tokens.len() - last..]);
    let options = PrefillOptions::new().chunk(chunk).num_logits(last);
    let logits = model.decoder.prefill(&model.prompt(inputs)?, cache, method, options)?.logits.squeeze(0)?;
    model.decoder.device().synchronize()?;
    let prefill = start.elapsed();
    cache.check_logits(&logits)?;
    let targets = Tensor::new(targets, logits.device())?.unsqueeze(1)?;
    let likelihood = candle_nn::ops::log_softmax(&logits, 1)?.gather(&targets, 1)?;
    let loss = f64::from(likelihood.mean_all()?.neg()?.to_scalar::<f32>()?);
    if !loss.is_finite() {
        return Err(EvalError::wrong("perplexity", "a finite loss", loss));
    }
    Ok((SampleResult::Perplexity { loss, likeliest: logits.argmax(1)?.to_vec1()? }, prefill))
}
