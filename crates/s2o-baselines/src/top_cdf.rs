//! The fewest entries whose sum reaches a share: how most methods turn scores into a choice.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::error::BaselineError;
use crate::threshold::{Weight, greatest_threshold};

/// For every row (last dimension) of `scores`, non-negative: the entries in descending order until their sum reaches
/// `share` of the row's, the one that reaches it included. 1 for the chosen ones in a u8 mask of the same shape. Of equal
/// entries the lower index comes first on the CPU; on a GPU equal entries are chosen together. A row of zeros chooses
/// nothing; `share` 1 or more chooses every entry, also those that underflowed to 0.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf(scores: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    choose(scores, None, &[share])
}

/// As [`top_cdf`], where `kept`, u8 of the same shape, is not 0: these entries are chosen whatever they are, and their sum
/// counts first.
///
/// # Errors
/// If Candle fails.
pub fn top_cdf_beside(scores: &Tensor, kept: &Tensor, share: f64) -> Result<Tensor, BaselineError> {
    choose(scores, Some(kept), &[share])
}

/// [`top_cdf`] with a share for each of as many equal groups of consecutive rows: one a head, say.
pub(crate) fn top_cdf_by_group(scores: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
    choose(scores, None, shares)
}

fn choose(scores: &Tensor, kept: Option<&Tensor>, shares: &[f64]) -> Result<Tensor, BaselineError> {
    let scores = scores.to_dtype(DType::F32)?;
    let kept = match kept {
        Some(kept) => kept.ne(0u8)?,
        None => scores.zeros_like()?.to_dtype(DType::U8)?,
    };
    if scores.device().is_cpu() { by_sorting(&scores, &kept, shares) } else { by_threshold(&scores, &kept, shares) }
}

fn by_sorting(scores: &Tensor, kept: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
    let row_len = scores.dim(D::Minus1)?;
    let values = scores.flatten_all()?.to_vec1::<f32>()?;
    let mut mask = kept.flatten_all()?.to_vec1::<u8>()?;
    let group = values.len() / row_len / shares.len();
    mask.par_chunks_mut(row_len).zip(values.par_chunks(row_len)).enumerate().for_each(|(i, (mask, row))| {
        let share = shares[i / group];
        if share >= 1.0 {
            mask.fill(1);
            return;
        }
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

/// Without sorting, which GPUs do for short rows only.
fn by_threshold(scores: &Tensor, kept: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
    let (shape, row_len) = (scores.shape(), scores.dim(D::Minus1)?);
    let rows = scores.elem_count() / row_len / shares.len();
    let grouped = |x: &Tensor| x.contiguous()?.reshape((shares.len(), rows, row_len));
    let (scores, kept) = (grouped(scores)?, grouped(kept)?);
    let by_share = |value: fn(f64) -> f32| {
        let values: Vec<f32> = shares.iter().map(|&share| value(share)).collect();
        Tensor::new(values, scores.device())?.reshape(((), 1, 1))
    };
    let others = kept.where_cond(&scores.zeros_like()?, &scores)?;
    let total = scores.sum_keepdim(D::Minus1)?;
    // What the kept entries leave to the others: total * share - (total - others).
    let left_out = total.broadcast_mul(&by_share(|share| (1.0 - share).max(0.0) as f32)?)?;
    let wanted = (others.sum_keepdim(D::Minus1)? - left_out)?;
    let least = greatest_threshold(&others, &wanted, Weight::Values)?;
    let chosen = (others.broadcast_ge(&least)? * others.gt(0f32)?)?.maximum(&kept)?;
    let everything = by_share(|share| f32::from(u8::from(share >= 1.0)))?.to_dtype(DType::U8)?;
    Ok(chosen.broadcast_maximum(&everything)?.reshape(shape)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

    use super::*;

    fn without_kept(scores: &Tensor) -> Tensor {
        scores.zeros_like().unwrap().to_dtype(DType::U8).unwrap()
    }

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
            let chosen = |share| way(&scores, &kept, &[share]).unwrap().to_vec2::<u8>().unwrap();
            assert_eq!(chosen(0.25), [[0, 0, 1, 1]]);
            assert_eq!(chosen(0.6), [[1, 0, 1, 1]]);
            assert_eq!(chosen(0.9), [[1, 1, 1, 1]]);
        }
    }

    #[test]
    fn each_group_of_rows_has_its_share() {
        let scores = Tensor::new(&[[0.5f32, 0.3, 0.2], [0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.0; 3]], &Device::Cpu);
        let scores = scores.unwrap();
        for way in [by_sorting, by_threshold] {
            let chosen = way(&scores, &without_kept(&scores), &[0.6, 1.0]).unwrap();
            assert_eq!(chosen.to_vec2::<u8>().unwrap(), [[1, 1, 0], [0, 1, 1], [1; 3], [1; 3]]);
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
            let sorted = by_sorting(&scores, &kept, &[share]).unwrap().to_vec2::<u8>().unwrap();
            let bisected = by_threshold(&scores, &kept, &[share]).unwrap().to_vec2::<u8>().unwrap();
            let differing = sorted[0].iter().zip(&bisected[0]).filter(|(a, b)| a != b).count();
            // The sum in f32 may fall on the other side of the share for one entry, or for equal ones.
            prop_assert!(differing <= 1, "{differing} of {}", row.len());
        }
    }
}
