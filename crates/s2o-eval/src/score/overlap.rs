//! F1 of the words or characters that two texts share.

use std::collections::HashMap;
use std::hash::Hash;

/// Chinese punctuation in addition to ASCII's.
const CHINESE_PUNCTUATION: &str = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏";

pub(super) fn token_f1(prediction: &str, reference: &str) -> f64 {
    let (prediction, reference) = (unpunctuated(prediction, ""), unpunctuated(reference, ""));
    let words = |text: &str| -> Vec<String> {
        let words = text.split_whitespace().filter(|word| !["a", "an", "the"].contains(word));
        words.map(str::to_owned).collect()
    };
    f1(&words(&prediction), &words(&reference))
}

pub(super) fn character_f1(prediction: &str, reference: &str) -> f64 {
    let characters = |text: &str| -> Vec<char> {
        unpunctuated(text, CHINESE_PUNCTUATION).chars().filter(|c| !c.is_whitespace()).collect()
    };
    f1(&characters(prediction), &characters(reference))
}

fn unpunctuated(text: &str, more: &str) -> String {
    text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation() && !more.contains(*c)).collect()
}

/// F1 of the items; each occurrence counts once.
fn f1<T: Hash + Eq>(prediction: &[T], reference: &[T]) -> f64 {
    let mut left: HashMap<&T, usize> = HashMap::new();
    reference.iter().for_each(|token| *left.entry(token).or_default() += 1);
    let mut common = 0;
    for token in prediction {
        if let Some(count) = left.get_mut(token).filter(|count| **count > 0) {
            *count -= 1;
            common += 1;
        }
    }
    f_measure(common, prediction.len(), reference.len())
}

/// The harmonic mean of precision and recall; 0 if nothing is common.
pub(super) fn f_measure(common: usize, predicted: usize, referenced: usize) -> f64 {
    if common == 0 { 0.0 } else { 2.0 * common as f64 / (predicted + referenced) as f64 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_are_normalised() {
        assert_eq!(token_f1("The Cat, an animal!", "cat animal"), 1.0);
        assert_eq!(token_f1("well-known", "wellknown"), 1.0);
        assert_eq!(token_f1("dog", "cat"), 0.0);
        assert_eq!(token_f1("", "cat"), 0.0);
        assert_eq!(token_f1("the", "the"), 0.0);
    }

    #[test]
    fn precision_and_recall_both_count() {
        // One of two words right, one of one found: precision 1/2, recall 1.
        assert!((token_f1("red cat", "cat") - 2.0 / 3.0).abs() < 1e-12);
        // A repeated word counts as often as the reference has it.
        assert!((token_f1("cat cat cat", "cat") - 0.5).abs() < 1e-12);
    }

    #[test]
    fn chinese_counts_characters() {
        assert_eq!(character_f1("《红楼》 梦。", "《红楼梦"), 1.0);
        assert!((character_f1("红楼", "红楼梦") - 0.8).abs() < 1e-12);
        assert_eq!(character_f1("西游", "红楼梦"), 0.0);
        assert_eq!(character_f1("", "红"), 0.0);
    }

    proptest! {
        #[test]
        fn symmetric_and_1_for_itself(a in "[b-f ]{0,12}", b in "[b-f ]{0,12}") {
            for f1 in [token_f1, character_f1] {
                prop_assert!((f1(&a, &b) - f1(&b, &a)).abs() < 1e-12);
                prop_assert_eq!(f1(&a, &a), if a.trim().is_empty() { 0.0 } else { 1.0 });
            }
        }
    }
}
