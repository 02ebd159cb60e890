//! The fewest entries whose sum reaches a share: how most methods turn scores into a choice.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::selector::BaselineError;

/// For every row (last dimension) of `scores`, non-negative f32: the entries in descending order until their sum reaches
/// `share` of the row's, the one that reaches it included. 1 for the chosen ones in a u8 mask of the same shape. Of equal
/// entries the lower index comes first on the CPU; on a GPU equal entries are chosen together. A row of zeros chooses
/// nothing; `share` 1 or more chooses all entries, those too that have rounded to zero.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    top_cdf_beside(scores, &scores.zeros_like()?.to_dtype(DType::U8)?, share)
}

/// As [`top_cdf`], where `kept`, u8 of the same shape, is not 0: these entries are chosen whatever they are, and their sum
/// counts first.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf_beside(scores: &Tensor, kept: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    let scores = scores.to_dtype(DType::F32)?;
    let kept = kept.ne(0u8)?;
    if share >= 1.0 {
        Ok(kept.ones_like()?)
    } else if scores.device().is_cpu() {
        by_sorting(&scores, &kept, share)
    } else {
        by_threshold(&scores, &kept, share)
    }
}

fn by_sorting(scores: &Tensor, kept: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    let row_len = scores.dim(D::Minus1)?;
    let values = scores.flatten_all()?.to_vec1::<f32>()?;
    let mut mask = kept.flatten_all()?.to_vec1::<u8>()?;
    mask.par_chunks_mut(row_len).zip(values.par_chunks(row_len)).for_each(|(mask, row)| {
        let wanted = share * row.iter().map(|&x| f64::from(x)).sum::<f64>();
        let mut sum: f64 = (0..row.len()).filter(|&i| mask[i] != 0).map(|i| f64::from(row[i])).sum();
        let mut order: Vec<usize> = (0..row.len()).filter(|&i| mask[i] == 0 && row[i] > 0.0).collect();
        order.sort_unstable_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        for i in order {
            if sum >= wanted {
                break;
            }
            mask[i] = 1;
            sum += f64::from(row[i]);
        }
    });
    Ok(Tensor::from_vec(mask, scores.shape(), scores.device())?)
}

/// Without sorting, which GPUs do for short rows only: bisects each row's least chosen value.
fn by_threshold(scores: &Tensor, kept: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    /// Halvings of (0, largest]: f32 has 24 bits of fraction, and the threshold may be 2^-16 of the largest.
    const STEPS: usize = 40;
    let others = kept.where_cond(&scores.zeros_like()?, scores)?;
    let total = scores.sum_keepdim(D::Minus1)?;
    // What the kept entries leave to the others: total * share - (total - others).
    let wanted = (others.sum_keepdim(D::Minus1)? - (total * (1.0 - share))?)?;
    // The sum of what is >= low reaches what is wanted; of what is >= high it does not, or nothing is wanted.
    let mut low = wanted.zeros_like()?;
    let mut high = (others.max_keepdim(D::Minus1)? * 2.0)?;
    for _ in 0..STEPS {
        let middle = ((&low + &high)? * 0.5)?;
        let chosen = others.broadcast_ge(&middle)?.to_dtype(DType::F32)?;
        let reaches = (&others * chosen)?.sum_keepdim(D::Minus1)?.ge(&wanted)?;
        low = reaches.where_cond(&middle, &low)?;
        high = reaches.where_cond(&high, &middle)?;
    }
    let chosen = (others.broadcast_ge(&low)? * others.gt(0f32)?)?;
    Ok(chosen.maximum(kept)?)
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
        assert_eq!(chosen(1.0), [[1; 4]; 3]);
    }

    #[test]
    fn kept_entries_count_first() {
        let scores = Tensor::new(&[[0.5f32, 0.2, 0.2, 0.1]], &Device::Cpu).unwrap();
        let kept = Tensor::new(&[[0u8, 0, 1, 1]], &Device::Cpu).unwrap();
        for way in [by_sorting, by_threshold] {
            let chosen = |share| way(&scores, &kept, share).unwrap().to_vec2::<u8>().unwrap();
            assert_eq!(chosen(0.25), [[0, 0, 1, 1]]);
            assert_eq!(chosen(0.6), [[1, 0, 1, 1]]);
            assert_eq!(chosen(0.9), [[1, 1, 1, 1]]);
        }
    }

    proptest! {
        #[test]
        fn both_ways_choose_alike(
            row in proptest::collection::vec(0.0f32..1.0, 1..300),
            share in 0.01f64..1.0,
            every in prop_oneof![Just(usize::MAX), 1usize..50],
        ) {
            // Spread like a softmax, so that small entries matter too.
            let row: Vec<f32> = row.iter().map(|x| (x * 20.0).exp()).collect();
            let scores = Tensor::new(row.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let kept: Vec<u8> = (0..row.len()).map(|i| u8::from(i % every == every - 1)).collect();
            let kept = Tensor::from_vec(kept, (1, row.len()), &Device::Cpu).unwrap();
            let sorted = by_sorting(&scores, &kept, share).unwrap().to_vec2::<u8>().unwrap();
            let bisected = by_threshold(&scores, &kept, share).unwrap().to_vec2::<u8>().unwrap();
            let differing = sorted[0].iter().zip(&bisected[0]).filter(|(a, b)| a != b).count();
            // The sum in f32 may fall on the other side of the share for one entry, or for equal ones.
            prop_assert!(differing <= 1, "{differing} of {}", row.len());
        }
    }
}
