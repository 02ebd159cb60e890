//! Greedy answers.

use std::time::{Duration, Instant};

use candle_s2o::Attention;
use s2o_models::{GenerationOptions, KvCache, LoadedModel, PrefillOptions, TextStream, TokenStream};

use crate::error::Result;
use crate::score::Scorer;
use crate::tasks::Item;

/// Prefills `tokens`, then generates until the model ends its turn, `item.max_new_tokens` are generated, or the score
/// can no longer change. The time is that of the prefill.
pub(super) fn answer(
    model: &LoadedModel,
    tokens: &[u32],
    item: &Item,
    cache: &mut KvCache,
    method: &dyn Attention,
    chunk: Option<usize>,
) -> Result<(String, Duration)> {
    let start = Instant::now();
    let options = PrefillOptions::new().chunk(chunk);
    let logits = model.decoder.prefill(&model.prompt(tokens)?, cache, method, options)?.last_logits()?;
    model.decoder.device().synchronize()?;
    let prefill = start.elapsed();

    let options = GenerationOptions { max_new_tokens: item.max_new_tokens, ..GenerationOptions::default() };
    let mut text = String::new();
    let mut pieces = TextStream::new(&model.tokenizer);
    for token in TokenStream::new(&model.decoder, cache, &logits, tokens, &model.eos_ids, &options)? {
        text.push_str(&pieces.push(token?)?);
        if let Some(end) = decided_at(item.scorer, &text) {
            text.truncate(end);
            return Ok((text, prefill));
        }
    }
    text.push_str(&pieces.finish()?);
    Ok((text, prefill))
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
