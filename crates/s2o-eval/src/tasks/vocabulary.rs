//! Words, numbers and names for tasks. Within one item they are all different.

use std::collections::{BTreeSet, HashSet};
use std::hash::Hash;
use std::sync::OnceLock;

use rand::RngExt;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::haystack::english;
use crate::error::Result;

/// English words in random order.
#[derive(Debug, Clone)]
pub(super) struct Words(Vec<&'static str>);

impl Words {
    pub(super) fn shuffled(random: &mut ChaCha8Rng) -> Result<Self> {
        let mut words = english_words()?.to_vec();
        words.shuffle(random);
        Ok(Self(words))
    }

    /// Word number `index`. After the last word, hyphenated pairs of words follow.
    pub(super) fn get(&self, index: usize) -> String {
        let count = self.0.len();
        match index.checked_sub(count) {
            None => self.0[index].to_owned(),
            Some(pair) => format!("{}-{}", self.0[pair / count % count], self.0[pair % count]),
        }
    }
}

/// Lower-case words of five to nine letters, as in needle-11m's keys, in alphabetical order.
pub(super) fn english_words() -> Result<&'static [&'static str]> {
    static WORDS: OnceLock<Vec<&'static str>> = OnceLock::new();
    let text = english()?;
    Ok(WORDS.get_or_init(|| {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric());
        let is_key = |word: &&str| (5..=9).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_lowercase());
        words.filter(is_key).collect::<BTreeSet<_>>().into_iter().collect()
    }))
}

/// `count` distinct values of `draw`.
pub(super) fn distinct<T: Hash + Eq + Clone>(count: usize, mut draw: impl FnMut() -> T) -> Vec<T> {
    let (mut seen, mut values) = (HashSet::with_capacity(count), Vec::with_capacity(count));
    while values.len() < count {
        let value = draw();
        if seen.insert(value.clone()) {
            values.push(value);
        }
    }
    values
}

/// A number of `digits` digits that does not start with 0. At most 18 digits.
pub(super) fn number(random: &mut ChaCha8Rng, digits: u32) -> String {
    random.random_range(10_u64.pow(digits - 1)..10_u64.pow(digits)).to_string()
}

/// One of the words of a text.
pub(super) fn word_of(words: &'static str, random: &mut ChaCha8Rng) -> &'static str {
    words.split_whitespace().collect::<Vec<_>>().choose(random).copied().unwrap_or_default()
}

/// A random UUID (version 4).
pub(super) fn uuid(random: &mut ChaCha8Rng) -> String {
    let bits = random.random::<u128>() & !(0xf << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// `count` random letters of `alphabet`.
pub(super) fn letters(random: &mut ChaCha8Rng, alphabet: &[u8], count: usize) -> String {
    (0..count).map(|_| char::from(alphabet[random.random_range(0..alphabet.len())])).collect()
}

/// Invented proper names of six letters. Different indices have different names, and no name is part of another.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    offset: usize,
}

const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
const VOWELS: &[u8] = b"aeiou";
const NUM_SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();
const NUM_NAMES: usize = NUM_SYLLABLES.pow(3);

/// Has no common factor with the number of names, so that the indices reach each name once.
const STRIDE: usize = 100_003;

impl Names {
    pub(super) fn new(random: &mut ChaCha8Rng) -> Self {
        Self { offset: random.random_range(0..NUM_NAMES) }
    }

    pub(super) fn get(self, index: usize) -> String {
        let mut code = (self.offset + index % NUM_NAMES * STRIDE) % NUM_NAMES;
        let mut name = String::with_capacity(6);
        for _ in 0..3 {
            let syllable = code % NUM_SYLLABLES;
            name.push(char::from(CONSONANTS[syllable / VOWELS.len()]));
            name.push(char::from(VOWELS[syllable % VOWELS.len()]));
            code /= NUM_SYLLABLES;
        }
        name[..1].make_ascii_uppercase();
        name
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    fn random() -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(7)
    }

    #[test]
    fn words_go_on_as_pairs_and_never_repeat() {
        let words = Words::shuffled(&mut random()).unwrap();
        let single = words.0.len();
        assert!(single > 3000, "{single}");
        let many: HashSet<String> = (0..3 * single).map(|i| words.get(i)).collect();
        assert_eq!(many.len(), 3 * single);
        assert!(!words.get(single - 1).contains('-') && words.get(single).contains('-'));
    }

    #[test]
    fn every_name_is_reached_once() {
        let names = Names::new(&mut random());
        let all: HashSet<String> = (0..NUM_NAMES).map(|i| names.get(i)).collect();
        assert_eq!(all.len(), NUM_NAMES);
        assert!(all.iter().take(100).all(|name| name.len() == 6 && name.starts_with(|c: char| c.is_ascii_uppercase())));
    }

    #[test]
    fn uuids_are_of_version_4() {
        let pattern =
            regex::Regex::new("^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$").unwrap();
        let mut random = random();
        for _ in 0..100 {
            let uuid = uuid(&mut random);
            assert!(pattern.is_match(&uuid), "{uuid}");
        }
    }

    #[test]
    fn numbers_have_their_digits() {
        let mut random = random();
        assert!((1..=18).all(|digits| number(&mut random, digits).len() == digits as usize));
    }

    #[test]
    fn distinct_drops_repetitions() {
        let mut count = 0;
        let values = distinct(3, || {
            count += 1;
            count / 2
        });
        assert_eq!(values, [0, 1, 2]);
    }
}
