//! A given number of the greatest entries of a row.

use candle_core::Tensor;

use crate::error::BaselineError;
use crate::row_choice::{RowChoice, Select};

/// Chooses the greatest entries of every row (last dimension) of `scores`, non-negative f32. `counts` is their number
/// per row (f32, of the same shape with a last dimension of 1). Returns a u8 mask, 1 for chosen entries. Of equal
/// entries the lower index comes first on the CPU; on a GPU equal entries are chosen together.
pub(crate) fn top_k(scores: &Tensor, counts: &Tensor) -> Result<Tensor, BaselineError> {
    RowChoice::default().choose(scores, Select::TopK(counts))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn as_many_as_asked_for(row in proptest::collection::vec(0.0f32..1.0, 1..300), count in 0..310usize) {
            let scores = Tensor::new(row.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let counts = Tensor::new(&[[count as f32]], &Device::Cpu).unwrap();
            let chosen = top_k(&scores, &counts).unwrap().to_vec2::<u8>().unwrap();
            let chosen = |i: &usize| chosen[0][*i] != 0;
            let (taken, left): (Vec<usize>, Vec<usize>) = (0..row.len()).partition(chosen);
            prop_assert_eq!(taken.len(), count.min(row.len()));
            let least = taken.iter().map(|&i| row[i]).fold(f32::INFINITY, f32::min);
            prop_assert!(left.iter().all(|&i| row[i] <= least));
        }
    }
}
