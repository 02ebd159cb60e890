//! Choices from rows of scores by a share of what they hold.

use candle_core::{D, DType, Tensor};
use rayon::prelude::*;

use crate::bounds::QueryBounds;
use crate::error::BaselineError;
use crate::pooling::softmax_of_seen;

/// What is chosen of every row (last dimension) of scores, and how rows are read. On CUDA all of it is one kernel. Tensors
/// are broadcast to the leading dimensions of the scores, of which they have consecutive ones.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowChoice<'a> {
    /// The choice is made from the softmax of the scores times this.
    pub(crate) softmax: Option<f32>,
    /// What the rows see, the last but one dimension of the scores being query blocks: nothing else is chosen. What they
    /// always take is chosen too.
    pub(crate) bounds: Option<&'a QueryBounds>,
    /// u8, a row each: where 0, an entry has no part in softmax and sum, and is chosen.
    pub(crate) trusted: Option<&'a Tensor>,
    /// u8, a row each: where not 0, an entry is chosen whatever it scores.
    pub(crate) kept: Option<&'a Tensor>,
    /// What is always taken or kept counts first. Otherwise it is chosen beside the choice.
    pub(crate) kept_first: bool,
    /// u8, 1 in the last dimension: where not 0, all that the row sees is chosen.
    pub(crate) whole: Option<&'a Tensor>,
    /// u8, 1 in the last dimension: where 0, no more of the row is chosen than is kept.
    pub(crate) asked: Option<&'a Tensor>,
    /// Columns 2i and 2i + 1 become one, chosen if either is.
    pub(crate) in_pairs: bool,
}

impl RowChoice<'_> {
    /// The entries of each row in descending order until they hold its share, as [`crate::top_cdf`]; one share for each of as
    /// many equal groups of consecutive rows. 1 for the chosen ones in a u8 mask.
    pub(crate) fn choose(&self, scores: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
        #[cfg(feature = "cuda")]
        if scores.device().is_cuda() {
            use candle_s2o::cuda;
            let bounds = self.bounds.map(|bounds| bounds.tensor(scores.device())).transpose()?;
            let choice = cuda::RowChoice {
                softmax: self.softmax,
                bounds: bounds.as_ref(),
                trusted: self.trusted,
                kept: self.kept,
                kept_first: self.kept_first,
                whole: self.whole,
                asked: self.asked,
                in_pairs: self.in_pairs,
            };
            return Ok(choice.choose(&scores.to_dtype(DType::F32)?, cuda::Wanted::Shares(shares))?);
        }
        self.by_sorting(scores, shares)
    }

    fn by_sorting(&self, scores: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
        let (shape, device, columns) = (scores.shape(), scores.device(), scores.dim(D::Minus1)?);
        let mut scores = scores.to_dtype(DType::F32)?;
        let seen = self.bounds.map(|bounds| bounds.seen(columns, device)).transpose()?;
        let counted = match (&seen, self.trusted) {
            (Some(seen), Some(trusted)) => Some(trusted.ne(0u8)?.broadcast_mul(seen)?),
            (Some(seen), None) => Some(seen.clone()),
            (None, Some(trusted)) => Some(trusted.ne(0u8)?),
            (None, None) => None,
        };
        if let Some(scale) = self.softmax {
            scores = softmax_of_seen(&scores, scale, counted.as_ref())?;
        } else if let Some(counted) = counted {
            scores = counted.broadcast_as(shape)?.where_cond(&scores, &scores.zeros_like()?)?;
        }
        let mut taken = Tensor::zeros(shape, DType::U8, device)?;
        if let Some(kept) = self.kept {
            taken = taken.broadcast_maximum(&kept.ne(0u8)?)?;
        }
        if let Some(bounds) = self.bounds {
            taken = taken.broadcast_maximum(&bounds.always(columns, device)?)?;
        }
        let first = if self.kept_first { taken.clone() } else { taken.zeros_like()? };
        let mut chosen = in_descending_order(&scores, &first, shares)?;
        if let Some(asked) = self.asked {
            chosen = chosen.broadcast_mul(&asked.ne(0u8)?)?;
        }
        chosen = chosen.maximum(&taken)?;
        if let Some(trusted) = self.trusted {
            chosen = chosen.broadcast_maximum(&trusted.eq(0u8)?)?;
        }
        if let Some(whole) = self.whole {
            chosen = chosen.broadcast_maximum(&whole.ne(0u8)?)?;
        }
        if let Some(seen) = seen {
            chosen = chosen.broadcast_mul(&seen)?;
        }
        if self.in_pairs { either_of_pairs(&chosen) } else { Ok(chosen) }
    }
}

fn in_descending_order(scores: &Tensor, kept: &Tensor, shares: &[f64]) -> Result<Tensor, BaselineError> {
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

/// From `(.., columns)` to `(.., columns / 2)`, rounded up.
fn either_of_pairs(mask: &Tensor) -> Result<Tensor, BaselineError> {
    let columns = mask.dim(D::Minus1)?;
    let mut sizes = mask.dims().to_vec();
    sizes.pop();
    sizes.extend([columns.div_ceil(2), 2]);
    let pairs = mask.pad_with_zeros(D::Minus1, 0, columns % 2)?.reshape(sizes)?;
    let half = |half: usize| pairs.narrow(D::Minus1, half, 1);
    Ok(half(0)?.maximum(&half(1)?)?.squeeze(D::Minus1)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_s2o::AttnShape;

    use super::*;
    use crate::mask::first_and_own;

    fn tensor<T: candle_core::WithDType>(data: &[T]) -> Tensor {
        Tensor::new(data, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
    }

    #[test]
    fn kept_entries_count_first_or_not_at_all() {
        let (scores, kept) = (tensor(&[0.5f32, 0.2, 0.2, 0.1]), tensor(&[0u8, 0, 1, 1]));
        let chosen = |kept_first, share| {
            let choice = RowChoice { kept: Some(&kept), kept_first, ..RowChoice::default() };
            choice.choose(&scores, &[share]).unwrap().to_vec2::<u8>().unwrap()
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
        let (whole, asked) = (by_row(&[0, 1, 0]), by_row(&[1, 1, 0]));
        let choice = RowChoice { whole: Some(&whole), asked: Some(&asked), ..RowChoice::default() };
        let chosen = |share| choice.choose(&scores, &[share]).unwrap().to_vec2::<u8>().unwrap();
        assert_eq!(chosen(0.6), [[1, 1, 0], [1, 1, 1], [0, 0, 0]]);
        assert_eq!(chosen(1.0), [[1, 1, 1], [1, 1, 1], [0, 0, 0]]);
    }

    #[test]
    fn each_group_of_rows_has_its_share() {
        let scores = Tensor::new(&[[0.5f32, 0.3, 0.2], [0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.0; 3]], &Device::Cpu);
        let chosen = RowChoice::default().choose(&scores.unwrap(), &[0.6, 1.0]).unwrap();
        assert_eq!(chosen.to_vec2::<u8>().unwrap(), [[1, 1, 0], [0, 1, 1], [1; 3], [1; 3]]);
    }

    #[test]
    fn hidden_entries_have_no_part() {
        // Two query blocks at the end of five key blocks.
        let shape = AttnShape::new([1, 2 * 128, 1, 8], [5 * 128, 1]).unwrap();
        let bounds = QueryBounds::new(&shape, |block| (block + 1, first_and_own(block)));
        let scores = Tensor::new(&[[1f32, 2.0, 9.0, 1.0, 30.0], [1.0, 2.0, 9.0, 1.0, 1.0]], &Device::Cpu).unwrap();
        let trusted = tensor(&[1u8, 1, 0, 1, 1]);
        let choice =
            RowChoice { softmax: Some(2.0), bounds: Some(&bounds), trusted: Some(&trusted), ..RowChoice::default() };
        // Of what is left the second holds e^4 / (e^2 + e^4 + e^2), that is 0.79.
        let chosen = choice.choose(&scores, &[0.75]).unwrap();
        assert_eq!(chosen.to_vec2::<u8>().unwrap(), [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]);
        let pairs = RowChoice { in_pairs: true, ..choice }.choose(&scores, &[0.75]).unwrap();
        assert_eq!(pairs.to_vec2::<u8>().unwrap(), [[1, 1, 0], [1, 1, 1]]);
    }
}
