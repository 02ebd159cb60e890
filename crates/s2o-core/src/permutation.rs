//! Checked permutations and the descending argsort whose tie rule every backend follows.

use thiserror::Error;

/// The reason a list of indices is not a permutation.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum PermutationError {
    /// An index is not below the length.
    #[error("permutation: expected indices below {len}, got {got} at place {place}")]
    OutOfRange { len: usize, got: u32, place: usize },
    /// An index occurs twice.
    #[error("permutation: expected each index once, got {got} again at place {place}")]
    Repeated { got: u32, place: usize },
    /// The permutation does not fit what it orders.
    #[error("permutation: expected {expected} indices, got {got}")]
    Length { expected: usize, got: usize },
}

/// A permutation of `0..len`: place `i` holds the index of the item that comes `i`-th.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Permutation(Vec<u32>);

impl Permutation {
    /// Checks that each of `0..indices.len()` occurs exactly once.
    ///
    /// # Errors
    /// [`PermutationError`] with the first index at fault.
    pub fn new(indices: Vec<u32>) -> Result<Self, PermutationError> {
        let len = indices.len();
        let mut seen = vec![false; len];
        for (place, &got) in indices.iter().enumerate() {
            match seen.get_mut(got as usize) {
                None => return Err(PermutationError::OutOfRange { len, got, place }),
                Some(true) => return Err(PermutationError::Repeated { got, place }),
                Some(seen) => *seen = true,
            }
        }
        Ok(Self(indices))
    }

    /// The natural order of `len` items.
    pub fn identity(len: usize) -> Self {
        Self((0..len as u32).collect())
    }

    /// The order that puts larger scores first, see [`order_desc`].
    pub fn argsort_desc(scores: &[f64]) -> Self {
        let mut indices: Vec<u32> = (0..scores.len() as u32).collect();
        indices.sort_by(|&a, &b| order_desc(scores[a as usize], scores[b as usize]));
        Self(indices)
    }

    /// A permutation of sorted indices. The caller guarantees that they are distinct and in range.
    pub(crate) fn from_sorted(indices: Vec<u32>) -> Self {
        debug_assert!(Self::new(indices.clone()).is_ok());
        Self(indices)
    }

    /// The indices in order.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the permutation has no items.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The order of scores in a ranking: larger scores first, equal scores by lower index, and non-finite scores (NaN and
/// both infinities, treated as equal) before all others. A non-finite key is therefore always visited, and makes the
/// output NaN as in dense attention.
///
/// Use it with a stable sort, which keeps the lower index first.
pub fn order_desc(a: f64, b: f64) -> std::cmp::Ordering {
    match (a.is_finite(), b.is_finite()) {
        (true, true) => b.partial_cmp(&a).expect("neither is NaN"),
        (a_finite, b_finite) => a_finite.cmp(&b_finite),
    }
}

/// Sort key of the fast paths. Ascending order of the keys equals [`order_desc`] on `score`, then ascending `index`.
pub(crate) fn sort_key(score: f32, index: u32) -> u64 {
    // -0.0 + 0.0 is +0.0, so the two zeros tie.
    let bits = if score.is_finite() { (score + 0.0).to_bits() } else { f32::INFINITY.to_bits() };
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    (u64::from(!ascending) << 32) | u64::from(index)
}

/// Sorts keys of [`sort_key`] whose indices ascend. The sort is stable by score, which keeps the lower index first. It
/// is a radix sort with 11-bit digits, several times faster than a comparison sort at these lengths.
pub(crate) fn sort_by_score(keys: &mut Vec<u64>) {
    const DIGIT: u32 = 11;
    let mut sorted = vec![0; keys.len()];
    for shift in [32, 32 + DIGIT, 32 + 2 * DIGIT] {
        let digit = |key: u64| (key >> shift) as usize & ((1 << DIGIT) - 1);
        let mut ends = [0u32; 1 << DIGIT];
        keys.iter().for_each(|&key| ends[digit(key)] += 1);
        if ends.contains(&(keys.len() as u32)) {
            continue;
        }
        let mut sum = 0;
        for slot in &mut ends {
            sum += std::mem::replace(slot, sum);
        }
        for &key in keys.iter() {
            let slot = &mut ends[digit(key)];
            sorted[*slot as usize] = key;
            *slot += 1;
        }
        std::mem::swap(keys, &mut sorted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refuses_what_is_no_permutation() {
        assert_eq!(Permutation::new(vec![0, 3, 1]), Err(PermutationError::OutOfRange { len: 3, got: 3, place: 1 }));
        assert_eq!(Permutation::new(vec![0, 1, 1]), Err(PermutationError::Repeated { got: 1, place: 2 }));
        assert!(!Permutation::new(vec![2, 0, 1]).unwrap().is_empty());
        assert!(Permutation::new(vec![]).unwrap().is_empty());
    }

    #[test]
    fn ties_keep_the_lower_index_first_and_what_is_not_finite_leads() {
        let scores = [1.0, 2.0, f64::NAN, 2.0, -0.0, 0.0, f64::NEG_INFINITY];
        assert_eq!(Permutation::argsort_desc(&scores).as_slice(), [2, 6, 1, 3, 0, 4, 5]);
    }

    proptest! {
        #[test]
        fn sort_keys_order_as_argsort(scores in prop::collection::vec(
            prop_oneof![any::<f32>(), Just(0.0), Just(-0.0), Just(f32::NAN), Just(1.0)], 0..64)) {
            let mut keys: Vec<u64> = scores.iter().zip(0..).map(|(&s, i)| sort_key(s, i)).collect();
            sort_by_score(&mut keys);
            let by_key: Vec<u32> = keys.iter().map(|&k| k as u32).collect();
            let sorted = Permutation::argsort_desc(&scores.iter().map(|&s| f64::from(s)).collect::<Vec<_>>());
            prop_assert_eq!(by_key.as_slice(), sorted.as_slice());
        }
    }
}
