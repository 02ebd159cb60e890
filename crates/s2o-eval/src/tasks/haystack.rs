//! The text around hidden facts, and the places of the facts.

use std::sync::OnceLock;

use rand::RngExt;
use rand::seq::index;
use rand_chacha::ChaCha8Rng;
use s2o_models::passkey;

use crate::error::Result;

/// RULER's repeated sentences.
pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// Number of evenly spaced depths at which RULER hides needles.
const NUM_DEPTHS: usize = 40;

/// The embedded English text.
pub(super) fn english() -> Result<&'static str> {
    static TEXT: OnceLock<String> = OnceLock::new();
    match TEXT.get() {
        Some(text) => Ok(text),
        None => {
            let text = passkey::haystack()?;
            Ok(TEXT.get_or_init(|| text))
        }
    }
}

/// Endless English text that begins at one of the text's lines.
#[derive(Debug, Clone, Copy)]
pub(super) struct Essay {
    text: &'static str,
    start: usize,
}

impl Essay {
    /// From a random line.
    pub(super) fn from_somewhere(random: &mut ChaCha8Rng) -> Result<Self> {
        let text = english()?;
        let place = random.random_range(0..text.len());
        let line_end = text.as_bytes()[place..].iter().position(|&byte| byte == b'\n');
        Ok(Self { text, start: line_end.map_or(0, |line_end| place + line_end + 1) })
    }

    /// From a line that depends only on `place`.
    pub(super) fn from_line(place: u64) -> Result<Self> {
        let text = english()?;
        let starts: Vec<usize> = text.match_indices('\n').map(|(end, _)| end + 1).collect();
        let start = starts.get((place % starts.len().max(1) as u64) as usize).copied().unwrap_or(0);
        Ok(Self { text, start })
    }

    /// At most `count` bytes, cut between words. After the text's end it starts again.
    pub(super) fn first_bytes(self, count: usize) -> String {
        let (before, after) = self.text.split_at(self.start);
        let mut essay = String::with_capacity(count);
        for part in [after, before].into_iter().cycle() {
            let room = count - essay.len();
            if room < part.len() {
                let end = (0..=room).rev().find(|&i| i == 0 || part.as_bytes()[i].is_ascii_whitespace());
                essay.push_str(&part[..end.unwrap_or(0)]);
                return essay;
            }
            essay.push_str(part);
        }
        essay
    }
}

/// `count` lines of [`NOISE`].
pub(super) fn noise(count: usize) -> String {
    vec![NOISE; count].join("\n")
}

/// `count` different depths of RULER's forty, in random order. `first`, if given, replaces the first one.
pub(super) fn depths(random: &mut ChaCha8Rng, count: usize, first: Option<f64>) -> Vec<f64> {
    let mut depths: Vec<f64> = index::sample(random, NUM_DEPTHS, count.min(NUM_DEPTHS))
        .iter()
        .map(|i| i as f64 / (NUM_DEPTHS - 1) as f64)
        .collect();
    if let (Some(depth), Some(place)) = (first, depths.first_mut()) {
        *place = depth;
    }
    depths
}

/// `body` with each needle on its own line, at the end of the sentence or line nearest to its depth. Needles at the
/// same place keep their order.
pub(super) fn hide<'a>(body: &str, needles: impl IntoIterator<Item = (f64, &'a str)>) -> String {
    let place = |depth: f64| nearest_sentence_end(body, (body.len() as f64 * depth) as usize);
    let mut placed: Vec<(usize, &str)> = needles.into_iter().map(|(depth, line)| (place(depth), line)).collect();
    placed.sort_by_key(|&(at, _)| at);
    let (mut text, mut shown) = (String::with_capacity(body.len() + 64 * placed.len()), 0);
    for (at, line) in placed {
        text.push_str(&body[shown..at]);
        text.push('\n');
        text.push_str(line);
        text.push('\n');
        shown = at;
    }
    text.push_str(&body[shown..]);
    text
}

/// Index of the line, among `len` lines, before which a line at `depth` is inserted.
pub(super) fn place_among(len: usize, depth: f64) -> usize {
    ((len as f64 * depth).round() as usize).min(len)
}

fn nearest_sentence_end(text: &str, at: usize) -> usize {
    if at == 0 || at >= text.len() {
        return at.min(text.len());
    }
    let bytes = text.as_bytes();
    let ends = |i: &usize| {
        bytes[i - 1] == b'\n' || (bytes[*i] == b' ' && matches!(bytes[i - 1], b'.' | b'!' | b'?' | b':' | b';'))
    };
    let before = (1..=at).rev().find(ends).unwrap_or(0);
    let after = (at..text.len()).find(ends).unwrap_or(text.len());
    if at - before <= after - at { before } else { after }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn essay_starts_again_at_its_end() {
        let essay = Essay::from_somewhere(&mut ChaCha8Rng::seed_from_u64(0)).unwrap();
        let long = essay.first_bytes(3 * english().unwrap().len());
        assert!(long.len() > 2 * essay.text.len());
        assert_eq!(long[..1000], long[essay.text.len()..essay.text.len() + 1000]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn essay_is_as_long_as_asked_less_a_word(seed in 0u64..1000, count in 0usize..5000) {
            let essay = Essay::from_somewhere(&mut ChaCha8Rng::seed_from_u64(seed)).unwrap().first_bytes(count);
            prop_assert!(essay.len() <= count && essay.len() + 400 >= count, "{} of {}", essay.len(), count);
        }

        #[test]
        fn hiding_changes_nothing_else(
            sentences in prop::collection::vec("[a-zé ]{1,12}[.!?] ", 0..20),
            depths in prop::collection::vec(0.0..=1.0f64, 0..6),
        ) {
            let body = sentences.concat();
            let text = hide(&body, depths.iter().map(|&depth| (depth, "NEEDLE")));
            prop_assert_eq!(text.matches("\nNEEDLE\n").count(), depths.len());
            prop_assert_eq!(text.replace("\nNEEDLE\n", ""), body);
        }

        #[test]
        fn depths_are_different_and_in_range(seed in 0u64..1000, count in 0usize..=NUM_DEPTHS) {
            let mut drawn = depths(&mut ChaCha8Rng::seed_from_u64(seed), count, None);
            prop_assert!(drawn.iter().all(|depth| (0.0..=1.0).contains(depth)));
            drawn.sort_by(f64::total_cmp);
            drawn.dedup();
            prop_assert_eq!(drawn.len(), count);
        }
    }

    #[test]
    fn needle_splits_no_sentence() {
        let text = "One sentence. Another one\nand a line";
        for at in 0..=text.len() {
            let place = nearest_sentence_end(text, at);
            assert!([0, 13, 26, text.len()].contains(&place), "{at} -> {place}");
        }
    }

    #[test]
    fn the_first_depth_can_be_chosen() {
        let drawn = depths(&mut ChaCha8Rng::seed_from_u64(5), 4, Some(0.123));
        assert_eq!((drawn.len(), drawn[0]), (4, 0.123));
    }
}
