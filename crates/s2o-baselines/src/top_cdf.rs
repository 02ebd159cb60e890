//! The fewest entries whose sum reaches a share: the rule by which most methods choose from scores.

use candle_core::Tensor;

use crate::error::BaselineError;
use crate::row_choice::{RowChoice, Select};

/// Chooses, from every row (last dimension) of non-negative `scores`, the entries in descending order until their sum
/// reaches `share` of the row's sum, including the entry that reaches it. Returns a u8 mask of the same shape, 1 for
/// chosen entries. Of equal entries the lower index comes first on the CPU; on a GPU equal entries are chosen together.
/// A row of zeros chooses nothing; a `share` of 1 or more chooses every entry, also those that underflowed to 0.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    RowChoice::default().choose(scores, Select::TopP(&[share]))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn the_entry_that_reaches_the_share_is_chosen() {
        let scores = Tensor::new(&[[0.5f32, 0.2, 0.2, 0.1], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 3.0]], &Device::Cpu);
        let scores = scores.unwrap();
        let chosen = |share| top_cdf(&scores, share).unwrap().to_vec2::<u8>().unwrap();
        assert_eq!(chosen(0.6), [[1, 1, 0, 0], [0; 4], [0, 0, 0, 1]]);
        assert_eq!(chosen(0.95), [[1, 1, 1, 1], [0; 4], [0, 1, 0, 1]]);
        assert_eq!(chosen(1.0), [[1; 4]; 3]);
    }
}
