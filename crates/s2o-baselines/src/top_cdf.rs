//! The fewest entries whose sum reaches a share: how most methods turn scores into a choice.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::selector::BaselineError;

/// For every row (last dimension) of `scores`, non-negative f32: the entries in descending order until their sum reaches
/// `share` of the row's, the one that reaches it included. 1 for the chosen ones in a u8 mask of the same shape. Of equal
/// entries the lower index comes first on the CPU; on a GPU equal entries are chosen together. A row of zeros chooses
/// nothing; `share` 1 or more chooses all entries above zero.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    if scores.device().is_cpu() { by_sorting(scores, share) } else { by_threshold(scores, share) }
}

fn by_sorting(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    let row_len = scores.dim(D::Minus1)?;
    let values = scores.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let mut mask = vec![0u8; values.len()];
    mask.par_chunks_mut(row_len).zip(values.par_chunks(row_len)).for_each(|(mask, row)| {
        let wanted = share * row.iter().map(|&x| f64::from(x)).sum::<f64>();
        let mut order: Vec<usize> = (0..row.len()).filter(|&i| row[i] > 0.0).collect();
        order.sort_unstable_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        let mut sum = 0.0;
        for i in order {
            if sum >= wanted && share < 1.0 {
                break;
            }
            mask[i] = 1;
            sum += f64::from(row[i]);
        }
    });
    Ok(Tensor::from_vec(mask, scores.shape(), scores.device())?)
}

/// Without sorting, which GPUs do for short rows only: bisects each row's least chosen value.
fn by_threshold(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    /// Halvings of (0, largest]: f32 has 24 bits of fraction, and the threshold may be 2^-16 of the largest.
    const STEPS: usize = 40;
    let scores = scores.to_dtype(DType::F32)?;
    let positive = scores.gt(0f32)?;
    if share >= 1.0 {
        return Ok(positive);
    }
    let wanted = (scores.sum_keepdim(D::Minus1)? * share)?;
    // The sum of what is >= low reaches the share; of what is >= high it does not.
    let mut low = wanted.zeros_like()?;
    let mut high = (scores.max_keepdim(D::Minus1)? * 2.0)?;
    for _ in 0..STEPS {
        let middle = ((&low + &high)? * 0.5)?;
        let chosen = scores.broadcast_ge(&middle)?.to_dtype(DType::F32)?;
        let reaches = (&scores * chosen)?.sum_keepdim(D::Minus1)?.ge(&wanted)?;
        low = reaches.where_cond(&middle, &low)?;
        high = reaches.where_cond(&high, &middle)?;
    }
    Ok((scores.broadcast_ge(&low)? * positive)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_entry_that_reaches_the_share_is_chosen() {
        let scores = Tensor::new(&[[0.5f32, 0.2, 0.2, 0.1], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 3.0]], &Device::Cpu);
        let scores = scores.unwrap();
        let chosen = |share| top_cdf(&scores, share).unwrap().to_vec2::<u8>().unwrap();
        assert_eq!(chosen(0.6), [[1, 1, 0, 0], [0; 4], [0, 0, 0, 1]]);
        assert_eq!(chosen(0.95), [[1, 1, 1, 1], [0; 4], [0, 1, 0, 1]]);
        assert_eq!(chosen(1.0), [[1, 1, 1, 1], [0; 4], [0, 1, 0, 1]]);
    }

    proptest! {
        #[test]
        fn both_ways_choose_alike(row in proptest::collection::vec(0.0f32..1.0, 1..300), share in 0.01f64..1.0) {
            // Spread like a softmax, so that small entries matter too.
            let row: Vec<f32> = row.iter().map(|x| (x * 20.0).exp()).collect();
            let scores = Tensor::new(row.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let sorted = by_sorting(&scores, share).unwrap().to_vec2::<u8>().unwrap();
            let bisected = by_threshold(&scores, share).unwrap().to_vec2::<u8>().unwrap();
            let differing = sorted[0].iter().zip(&bisected[0]).filter(|(a, b)| a != b).count();
            // The sum in f32 may fall on the other side of the share for one entry, or for equal ones.
            prop_assert!(differing <= 1, "{differing} of {}", row.len());
        }
    }
}
