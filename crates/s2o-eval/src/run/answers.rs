//! Answers to one prompt by several methods: each method prefills its own sequence, and all sequences are decoded
//! together.

use std::time::{Duration, Instant};

use candle_core::{D, DType, Tensor};
use candle_s2o::Attention;
use s2o_models::{KvCache, LoadedModel, PrefillOptions, TextStream};

use crate::error::Result;
use crate::score::Scorer;
use crate::tasks::Item;

/// Prefills `tokens` into an empty cache of one sequence. Returns the logits of the last position, `(1, vocab_size)`,
/// and the wall time.
pub(super) fn prefill(
    model: &LoadedModel,
    tokens: &[u32],
    cache: &mut KvCache,
    method: &dyn Attention,
    chunk: Option<usize>,
) -> Result<(Tensor, Duration)> {
    let start = Instant::now();
    let logits = forward(model, tokens, cache, method, chunk)?;
    let time = start.elapsed();
    cache.check_logits(&logits)?;
    Ok((logits, time))
}

/// [`prefill`] without its check and its time: the logits of the last position, after waiting for the device.
pub(super) fn forward(
    model: &LoadedModel,
    tokens: &[u32],
    cache: &mut KvCache,
    method: &dyn Attention,
    chunk: Option<usize>,
) -> Result<Tensor> {
    let options = PrefillOptions::new().chunk(chunk);
    let logits = model.decoder.prefill(&model.prompt(tokens)?, cache, method, options)?.last_logits()?;
    model.decoder.device().synchronize()?;
    Ok(logits)
}

/// Continues each sequence of `cache` greedily from its logits `(1, vocab_size)`, until the model ends its turn,
/// `item.max_new_tokens` are generated, or the score can no longer change.
pub(super) fn decode(model: &LoadedModel, item: &Item, cache: &mut KvCache, logits: &[Tensor]) -> Result<Vec<String>> {
    let mut logits = Tensor::cat(logits, 0)?;
    let mut answers: Vec<Answer> = (0..cache.batch()).map(|_| Answer::new(model)).collect();
    for position in 0..item.max_new_tokens {
        if position > 0 {
            let last: Vec<u32> = answers.iter().map(|answer| answer.last).collect();
            let last = Tensor::new(last, model.decoder.device())?.unsqueeze(1)?;
            logits = model.decoder.decode(&last, cache)?;
            cache.check_logits(&logits)?;
        }
        let likeliest = logits.to_dtype(DType::F32)?.argmax(D::Minus1)?.to_vec1()?;
        for (answer, token) in answers.iter_mut().zip(likeliest) {
            answer.push(token, &model.eos_ids, item.scorer)?;
        }
        if answers.iter().all(|answer| answer.is_complete) {
            break;
        }
    }
    answers.into_iter().map(Answer::finish).collect()
}

/// The answer of one sequence. A complete answer ignores further tokens, which its sequence still computes.
struct Answer<'m> {
    pieces: TextStream<'m>,
    text: String,
    last: u32,
    is_complete: bool,
}

impl<'m> Answer<'m> {
    fn new(model: &'m LoadedModel) -> Self {
        Self { pieces: TextStream::new(&model.tokenizer), text: String::new(), last: 0, is_complete: false }
    }

    fn push(&mut self, token: u32, eos_ids: &[u32], scorer: Scorer) -> Result<()> {
        if self.is_complete {
            return Ok(());
        }
        self.last = token;
        if eos_ids.contains(&token) {
            self.text.push_str(&self.pieces.finish()?);
            self.is_complete = true;
            return Ok(());
        }
        self.text.push_str(&self.pieces.push(token)?);
        if let Some(end) = decided_at(scorer, &self.text) {
            self.text.truncate(end);
            self.is_complete = true;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<String> {
        if !self.is_complete {
            self.text.push_str(&self.pieces.finish()?);
        }
        Ok(self.text)
    }
}

/// Length of the part of the prediction that counts, once it is complete.
fn decided_at(scorer: Scorer, prediction: &str) -> Option<usize> {
    match scorer {
        Scorer::FirstSentence => prediction.find('.').map(|stop| stop + 1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_first_sentence_decides_before_the_end() {
        assert_eq!(decided_at(Scorer::FirstSentence, " 1234567"), None);
        assert_eq!(decided_at(Scorer::FirstSentence, " 1234567. The"), Some(9));
        assert_eq!(decided_at(Scorer::StringMatchAll, " 1234567. The"), None);
    }
}
