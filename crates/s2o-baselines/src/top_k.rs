//! The greatest entries of a row, a given number of them.

use candle_core::{D, Tensor};
use rayon::prelude::*;

use crate::error::BaselineError;

/// For every row (last dimension) of `scores`, non-negative f32: its greatest entries, as many as `counts` says (f32, of
/// the same shape with a last dimension of 1). 1 for the chosen ones in a u8 mask. Of equal entries the lower index comes
/// first on the CPU; on a GPU equal entries are chosen together.
pub(crate) fn top_k(scores: &Tensor, counts: &Tensor) -> Result<Tensor, BaselineError> {
    #[cfg(feature = "cuda")]
    if scores.device().is_cuda() {
        use candle_s2o::cuda::{RowChoice, Wanted};
        return Ok(RowChoice::default().choose(scores, Wanted::Counts(counts))?);
    }
    by_sorting(scores, counts)
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
