//! [`RowChoice`]: choices from rows of scores.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::bounds::{always_taken, seen};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::BaselineError;
use crate::pooling::softmax_of_seen;

/// The amount that is chosen from each row.
#[derive(Debug, Clone, Copy)]
pub enum Select<'a> {
    /// The greatest entries until they hold a share of the row's sum, including the entry that reaches it. Equal groups
    /// of consecutive rows have one share each. Zeros are not chosen; a share of at least 1 chooses all seen entries.
    TopP(&'a [f64]),
    /// The greatest entries; their number per row is f32, of the shape of the scores with a last dimension of 1.
    TopK(&'a Tensor),
}

/// A rule that chooses entries from every row (last dimension) of scores. On CUDA it is one kernel for rows of up to
/// 8192 entries. The tensors have consecutive leading dimensions of the scores and are broadcast to the others.
#[derive(Debug, Clone, Copy, Default)]
pub struct RowChoice<'a> {
    /// If given, the choice is made from the softmax of the scores times this factor.
    pub softmax: Option<f32>,
    /// `[seen, sink, from, to]` in the last dimension, u32: only columns `0..seen` may be chosen; of these, `0..sink`
    /// and `from..to` always are.
    pub bounds: Option<&'a Tensor>,
    /// u8, for every column: a zero entry has no part in softmax, sum or count, and is chosen if it is seen.
    pub scored: Option<&'a Tensor>,
    /// u8, for every column: a nonzero entry is chosen if it is seen.
    pub forced: Option<&'a Tensor>,
    /// If true, entries that `bounds` or `forced` choose count first; otherwise they are chosen in addition.
    pub forced_count_first: bool,
    /// u8, last dimension 1: a nonzero row chooses all entries that it sees.
    pub select_all: Option<&'a Tensor>,
    /// u8, last dimension 1: a zero row chooses only its forced entries.
    pub enabled: Option<&'a Tensor>,
    /// If true, columns 2i and 2i + 1 become one column of the mask, chosen if either is.
    pub merge_pairs: bool,
}

impl RowChoice<'_> {
    /// Chooses from `scores`, which are non-negative unless there is a softmax, and returns a mask of u8: 1 if an entry
    /// is chosen. Of equal entries the lower index comes first on the CPU; on a GPU equal entries are chosen together.
    ///
    /// # Errors
    /// If the tensors do not fit each other, [`BaselineError::Option`] if shares are not for equal groups of rows, or
    /// Candle or the GPU fails.
    pub fn choose(&self, scores: &Tensor, select: Select<'_>) -> Result<Tensor, BaselineError> {
        let rows = scores.elem_count() / scores.dim(D::Minus1)?.max(1);
        if let Select::TopP(shares) = select {
            let fits = !shares.is_empty() && rows.is_multiple_of(shares.len());
            BaselineError::unless(fits, "row choice", ["shares", "one for each of equal groups"], shares.len())?;
        }
        let scores = scores.to_dtype(DType::F32)?;
        #[cfg(feature = "cuda")]
        if scores.device().is_cuda() {
            return Ok(cuda::choose(self, &scores, select)?);
        }
        self.by_sorting(scores, select)
    }

    fn by_sorting(&self, mut scores: Tensor, select: Select<'_>) -> Result<Tensor, BaselineError> {
        let (shape, columns) = (scores.shape().clone(), scores.dim(D::Minus1)?);
        let seen = self.bounds.map(|bounds| seen(bounds, columns)).transpose()?;
        let counted = match (&seen, self.scored) {
            (Some(seen), Some(scored)) => Some(scored.ne(0u8)?.broadcast_mul(seen)?),
            (Some(seen), None) => Some(seen.clone()),
            (None, Some(scored)) => Some(scored.ne(0u8)?),
            (None, None) => None,
        };
        if let Some(scale) = self.softmax {
            scores = softmax_of_seen(&scores, scale.into(), counted.as_ref())?;
        } else if let Some(counted) = counted {
            scores = counted.broadcast_as(&shape)?.where_cond(&scores, &scores.zeros_like()?)?;
        }
        let mut forced = Tensor::zeros(&shape, DType::U8, scores.device())?;
        if let Some(given) = self.forced {
            forced = forced.broadcast_maximum(&given.ne(0u8)?)?;
        }
        if let Some(bounds) = self.bounds {
            forced = forced.broadcast_maximum(&always_taken(bounds, columns)?)?;
        }
        let first = if self.forced_count_first { forced.clone() } else { forced.zeros_like()? };
        let mut chosen = in_descending_order(&scores, &first, select)?;
        if let Some(enabled) = self.enabled {
            chosen = chosen.broadcast_mul(&enabled.ne(0u8)?)?;
        }
        chosen = chosen.maximum(&forced)?;
        if let Some(scored) = self.scored {
            chosen = chosen.broadcast_maximum(&scored.eq(0u8)?)?;
        }
        if let Some(select_all) = self.select_all {
            chosen = chosen.broadcast_maximum(&select_all.ne(0u8)?)?;
        }
        if let Some(seen) = seen {
            chosen = chosen.broadcast_mul(&seen)?;
        }
        if self.merge_pairs { either_of_pairs(&chosen) } else { Ok(chosen) }
    }
}

/// Adds to the entries `first` of each row the greatest other entries, until the row holds the amount of `select`.
fn in_descending_order(scores: &Tensor, first: &Tensor, select: Select<'_>) -> Result<Tensor, BaselineError> {
    let row_len = scores.dim(D::Minus1)?;
    let values = scores.flatten_all()?.to_vec1::<f32>()?;
    let mut mask = first.flatten_all()?.to_vec1::<u8>()?;
    let counts = match select {
        Select::TopP(_) => Vec::new(),
        Select::TopK(counts) => counts.flatten_all()?.to_vec1::<f32>()?,
    };
    let rows = values.len() / row_len;
    mask.par_chunks_mut(row_len).zip(values.par_chunks(row_len)).enumerate().for_each(|(i, (mask, row))| {
        let total = || row.iter().map(|&x| f64::from(x)).sum::<f64>();
        let (wanted, by_count) = match select {
            Select::TopP(shares) => match shares[i / (rows / shares.len())] {
                share if share >= 1.0 => return mask.fill(1),
                share => (share * total(), false),
            },
            Select::TopK(_) => (f64::from(counts[i]).trunc(), true),
        };
        let weight = |i: usize| if by_count { 1.0 } else { f64::from(row[i]) };
        let mut sum: f64 = (0..row.len()).filter(|&i| mask[i] != 0).map(weight).sum();
        let mut order: Vec<usize> = (0..row.len()).filter(|&i| mask[i] == 0 && (by_count || row[i] > 0.0)).collect();
        order.sort_unstable_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        for i in order {
            if sum >= wanted {
                break;
            }
            mask[i] = 1;
            sum += weight(i);
        }
    });
    Ok(Tensor::from_vec(mask, scores.shape(), scores.device())?)
}

/// Merges pairs of columns: from `(.., columns)` to `(.., columns / 2)`, rounded up.
fn either_of_pairs(mask: &Tensor) -> Result<Tensor, BaselineError> {
    let columns = mask.dim(D::Minus1)?;
    let mut sizes = mask.dims().to_vec();
    sizes.pop();
    sizes.extend([columns.div_ceil(2), 2]);
    let pairs = mask.pad_with_zeros(D::Minus1, 0, columns % 2)?.reshape(sizes)?;
    let half = |half: usize| pairs.narrow(D::Minus1, half, 1);
    Ok(half(0)?.maximum(&half(1)?)?.squeeze(D::Minus1)?)
}

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

/// Chooses the greatest entries of every row (last dimension) of `scores`, non-negative f32. `counts` is their number
/// per row (f32, of the same shape with a last dimension of 1). Returns a u8 mask, 1 for chosen entries. Of equal
/// entries the lower index comes first on the CPU; on a GPU equal entries are chosen together.
pub(crate) fn top_k(scores: &Tensor, counts: &Tensor) -> Result<Tensor, BaselineError> {
    RowChoice::default().choose(scores, Select::TopK(counts))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_s2o::AttnShape;
    use proptest::prelude::*;

    use super::*;
    use crate::bounds::{first_and_own, query_bounds};

    fn tensor<T: candle_core::WithDType>(data: &[T]) -> Tensor {
        Tensor::new(data, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
    }

    #[test]
    fn kept_entries_count_first_or_not_at_all() {
        let (scores, forced) = (tensor(&[0.5f32, 0.2, 0.2, 0.1]), tensor(&[0u8, 0, 1, 1]));
        let chosen = |forced_count_first, share| {
            let choice = RowChoice { forced: Some(&forced), forced_count_first, ..RowChoice::default() };
            choice.choose(&scores, Select::TopP(&[share])).unwrap().to_vec2::<u8>().unwrap()
        };
        assert_eq!(chosen(true, 0.25), [[0, 0, 1, 1]]);
        assert_eq!(chosen(true, 0.6), [[1, 0, 1, 1]]);
        assert_eq!(chosen(true, 0.9), [[1, 1, 1, 1]]);
        assert_eq!(chosen(false, 0.25), [[1, 0, 1, 1]]);
        assert_eq!(chosen(false, 0.6), [[1, 1, 1, 1]]);
    }

    #[test]
    fn rows_are_chosen_whole_or_not_at_all() {
        let scores = tensor(&[0.5f32, 0.3, 0.2]).repeat((3, 1)).unwrap();
        let by_row = |rows: &[u8]| Tensor::new(rows, &Device::Cpu).unwrap().unsqueeze(1).unwrap();
        let (select_all, enabled) = (by_row(&[0, 1, 0]), by_row(&[1, 1, 0]));
        let choice = RowChoice { select_all: Some(&select_all), enabled: Some(&enabled), ..RowChoice::default() };
        let chosen = |share| choice.choose(&scores, Select::TopP(&[share])).unwrap().to_vec2::<u8>().unwrap();
        assert_eq!(chosen(0.6), [[1, 1, 0], [1, 1, 1], [0, 0, 0]]);
        assert_eq!(chosen(1.0), [[1, 1, 1], [1, 1, 1], [0, 0, 0]]);
    }

    #[test]
    fn each_group_of_rows_has_its_share() {
        let scores = Tensor::new(&[[0.5f32, 0.3, 0.2], [0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.0; 3]], &Device::Cpu);
        let chosen = RowChoice::default().choose(&scores.unwrap(), Select::TopP(&[0.6, 1.0])).unwrap();
        assert_eq!(chosen.to_vec2::<u8>().unwrap(), [[1, 1, 0], [0, 1, 1], [1; 3], [1; 3]]);
    }

    #[test]
    fn shares_that_do_not_fit_the_rows_are_refused() {
        let scores = Tensor::new(&[[0.5f32, 0.5], [0.5, 0.5], [0.5, 0.5]], &Device::Cpu).unwrap();
        for shares in [&[][..], &[0.6, 0.7]] {
            let error = RowChoice::default().choose(&scores, Select::TopP(shares)).unwrap_err().to_string();
            let expected = format!("row choice: shares: expected one for each of equal groups, got {}", shares.len());
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn hidden_entries_have_no_part() {
        // Two query blocks at the end of five key blocks.
        let shape = AttnShape::new([1, 2 * 128, 1, 8], [5 * 128, 1]).unwrap();
        let bounds = query_bounds(&shape, &Device::Cpu, |block| (block + 1, first_and_own(block))).unwrap();
        let scores = Tensor::new(&[[1f32, 2.0, 9.0, 1.0, 30.0], [1.0, 2.0, 9.0, 1.0, 1.0]], &Device::Cpu).unwrap();
        let scored = tensor(&[1u8, 1, 0, 1, 1]);
        let choice =
            RowChoice { softmax: Some(2.0), bounds: Some(&bounds), scored: Some(&scored), ..RowChoice::default() };
        // Of the entries that count, the second holds e^4 / (e^2 + e^4 + e^2), that is 0.79.
        let chosen = choice.choose(&scores, Select::TopP(&[0.75])).unwrap();
        assert_eq!(chosen.to_vec2::<u8>().unwrap(), [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]);
        let pairs = RowChoice { merge_pairs: true, ..choice }.choose(&scores, Select::TopP(&[0.75])).unwrap();
        assert_eq!(pairs.to_vec2::<u8>().unwrap(), [[1, 1, 0], [1, 1, 1]]);
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
