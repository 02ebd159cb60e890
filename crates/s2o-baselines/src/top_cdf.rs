//! The fewest entries whose sum reaches a share: how most methods turn scores into a choice.

use candle_core::Tensor;

use crate::error::BaselineError;
use crate::row_choice::{RowChoice, Select};

/// For every row (last dimension) of `scores`, non-negative: the entries in descending order until their sum reaches
/// `share` of the row's, the one that reaches it included. 1 for the chosen ones in a u8 mask of the same shape. Of
/// equal entries the lower index comes first on the CPU; on a GPU equal entries are chosen together. A row of zeros
/// chooses nothing; `share` 1 or more chooses every entry, also those that underflowed to 0.
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
