//! The greatest entries of a row, a given number of them.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::error::BaselineError;
use crate::threshold::{Weight, greatest_threshold};

/// For every row (last dimension) of `scores`, non-negative f32: its greatest entries, as many as `counts` says (f32, of
/// the same shape with a last dimension of 1). 1 for the chosen ones in a u8 mask. Of equal entries the lower index comes
/// first on the CPU; on a GPU equal entries are chosen together.
pub(crate) fn top_k(scores: &Tensor, counts: &Tensor) -> Result<Tensor, BaselineError> {
    if scores.device().is_cpu() { by_sorting(scores, counts) } else { by_threshold(scores, counts) }
}

fn by_sorting(scores: &Tensor, counts: &Tensor) -> Result<Tensor, BaselineError> {
    let row_len = scores.dim(D::Minus1)?;
    let values = scores.flatten_all()?.to_vec1::<f32>()?;
    let counts = counts.flatten_all()?.to_vec1::<f32>()?;
    let mut mask = vec![0u8; values.len()];
    mask.par_chunks_mut(row_len).zip(values.par_chunks(row_len)).zip(counts).for_each(|((mask, row), count)| {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_unstable_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        order.into_iter().take(count as usize).for_each(|i| mask[i] = 1);
    });
    Ok(Tensor::from_vec(mask, scores.shape(), scores.device())?)
}

fn by_threshold(scores: &Tensor, counts: &Tensor) -> Result<Tensor, BaselineError> {
    let least = greatest_threshold(scores, counts, Weight::Count)?;
    let chosen = scores.broadcast_ge(&least)?;
    Ok(chosen.broadcast_mul(&counts.gt(0f32)?.to_dtype(DType::U8)?)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn both_ways_choose_alike(row in proptest::collection::vec(0.0f32..1.0, 1..300), count in 0..310usize) {
            let row: Vec<f32> = row.iter().map(|x| (x * 20.0).exp()).collect();
            let scores = Tensor::new(row.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let counts = Tensor::new(&[[count as f32]], &Device::Cpu).unwrap();
            let sorted = by_sorting(&scores, &counts).unwrap().to_vec2::<u8>().unwrap();
            let chosen: usize = sorted[0].iter().map(|&x| usize::from(x)).sum();
            prop_assert_eq!(chosen, count.min(row.len()));
            let bisected = by_threshold(&scores, &counts).unwrap().to_vec2::<u8>().unwrap();
            let least = row.iter().zip(&sorted[0]).filter(|(_, c)| **c == 1).map(|(x, _)| *x).fold(f32::INFINITY, f32::min);
            for (i, &x) in row.iter().enumerate() {
                let equal = (x - least).abs() <= least * 1e-3;
                prop_assert!(sorted[0][i] == bisected[0][i] || equal, "{x} of {least}");
            }
        }
    }
}
