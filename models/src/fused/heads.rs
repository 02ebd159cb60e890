//! Heads of several ranks.

use candle_core::{Result, Tensor, bail};

#[cfg(feature = "cuda")]
use super::{cuda, supports};

/// The heads of all ranks side by side, `(rows, groups * width)`, from `x` `(ranks * rows, groups / ranks * width)`: one
/// rank after the other has sent the rows of its groups of heads. `slots` `(groups,)`, u32, says where `x` has each group,
/// counted rank after rank: group `slot % (groups / ranks)` of rank `slot / (groups / ranks)`. Each slot occurs once.
///
/// # Errors
/// If the shapes do not fit these numbers, or Candle's error if memory runs out.
pub fn join_heads(x: &Tensor, ranks: usize, slots: &Tensor) -> Result<Tensor> {
    let ((sent, width), groups) = (x.dims2()?, slots.dims1()?);
    if ranks == 0 || !sent.is_multiple_of(ranks) || !groups.is_multiple_of(ranks) || groups == 0 {
        bail!("expected rows and groups of {ranks} ranks, got {sent} rows and {groups} groups")
    }
    if !(ranks * width).is_multiple_of(groups) {
        bail!("expected columns of {} groups, got {width}", groups / ranks)
    }
    #[cfg(feature = "cuda")]
    if supports(x.device(), x.dtype())
        && (ranks * width / groups).is_multiple_of(s2o_kernels::decoder::VECTOR)
        && sent > 0
    {
        return Ok(cuda::join_heads(&x.contiguous()?, ranks, &slots.contiguous()?)?);
    }
    let rows = sent / ranks;
    let by_row = x.reshape((ranks, rows, groups / ranks, ()))?.transpose(0, 1)?;
    by_row.reshape((rows, groups, ()))?.index_select(slots, 1)?.reshape((rows, ranks * width))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_group_comes_from_its_slot() {
        // Two ranks with two groups each of width 2, and three rows.
        let x = Tensor::arange(0u32, 24, &Device::Cpu).unwrap().reshape((6, 4)).unwrap();
        let slots = Tensor::new(&[3u32, 0, 2, 1], &Device::Cpu).unwrap();
        let joined = join_heads(&x, 2, &slots).unwrap().to_vec2::<u32>().unwrap();
        // Rank 1 sent the rows 3 to 5, and its second group is in columns 2 and 3.
        assert_eq!(joined[0], [14, 15, 0, 1, 12, 13, 2, 3]);
        assert_eq!(joined[2], [22, 23, 8, 9, 20, 21, 10, 11]);
        assert_eq!(joined.len(), 3);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let slots = Tensor::new(&[0u32, 1, 2, 3], &Device::Cpu).unwrap();
        for (shape, ranks) in [((6, 4), 0), ((5, 4), 2), ((6, 4), 3), ((6, 3), 2)] {
            let x = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
            assert!(
                join_heads(&x, ranks, &slots).unwrap_err().to_string().starts_with("expected "),
                "{shape:?} {ranks}"
            );
        }
    }
}
