//! The fewest entries whose sum reaches a share: how most methods turn scores into a choice.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::selector::BaselineError;
use crate::threshold::greatest_threshold;

/// For every row (last dimension) of `scores`, non-negative f32: the entries in descending order until their sum reaches
/// `share` of the row's, the one that reaches it included. 1 for the chosen ones in a u8 mask of the same shape. Of equal
/// entries the lower index comes first on the CPU; on a GPU equal entries are chosen together. A row of zeros chooses
/// nothing; `share` 1 or more chooses all entries above zero.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    top_cdf_by_group(scores, &[share])
}

/// [`top_cdf`] with a share for each of as many equal groups of consecutive rows: one a head, say.
pub(crate) fn top_cdf_by_group(scores: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
    if scores.device().is_cpu() { by_sorting(scores, shares) } else { by_threshold(scores, shares) }
}

fn by_sorting(scores: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
    let row_len = scores.dim(D::Minus1)?;
    let values = scores.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let mut mask = vec![0u8; values.len()];
    let group = values.len() / row_len / shares.len();
    mask.par_chunks_mut(row_len).zip(values.par_chunks(row_len)).enumerate().for_each(|(i, (mask, row))| {
        let share = shares[i / group];
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

/// Without sorting, which GPUs do for short rows only.
fn by_threshold(scores: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
    let (shape, row_len) = (scores.shape(), scores.dim(D::Minus1)?);
    let rows = scores.elem_count() / row_len / shares.len();
    let scores = scores.to_dtype(DType::F32)?.contiguous()?.reshape((shares.len(), rows, row_len))?;
    // No sum reaches infinity, and the threshold stays at 0.
    let shares: Vec<f32> = shares.iter().map(|&share| if share < 1.0 { share as f32 } else { f32::INFINITY }).collect();
    let shares = Tensor::new(shares, scores.device())?.reshape(((), 1, 1))?;
    let wanted = (scores.sum_keepdim(D::Minus1)?.broadcast_mul(&shares))?;
    let least = greatest_threshold(&scores, |chosen| Ok((&scores * chosen)?.sum_keepdim(D::Minus1)?.ge(&wanted)?))?;
    Ok((scores.broadcast_ge(&least)? * scores.gt(0f32)?)?.reshape(shape)?)
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

    #[test]
    fn each_group_of_rows_has_its_share() {
        let scores = Tensor::new(&[[0.5f32, 0.3, 0.2], [0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.0; 3]], &Device::Cpu);
        for choose in [by_sorting, by_threshold] {
            let chosen = choose(scores.as_ref().unwrap(), &[0.6, 1.0]).unwrap();
            assert_eq!(chosen.to_vec2::<u8>().unwrap(), [[1, 1, 0], [0, 1, 1], [1, 1, 0], [0; 3]]);
        }
    }

    proptest! {
        #[test]
        fn both_ways_choose_alike(row in proptest::collection::vec(0.0f32..1.0, 1..300), share in 0.01f64..1.0) {
            // Spread like a softmax, so that small entries matter too.
            let row: Vec<f32> = row.iter().map(|x| (x * 20.0).exp()).collect();
            let scores = Tensor::new(row.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let sorted = by_sorting(&scores, &[share]).unwrap().to_vec2::<u8>().unwrap();
            let bisected = by_threshold(&scores, &[share]).unwrap().to_vec2::<u8>().unwrap();
            let differing = sorted[0].iter().zip(&bisected[0]).filter(|(a, b)| a != b).count();
            // The sum in f32 may fall on the other side of the share for one entry, or for equal ones.
            prop_assert!(differing <= 1, "{differing} of {}", row.len());
        }
    }
}
