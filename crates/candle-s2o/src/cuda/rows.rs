//! Launches of the kernels that choose from rows of scores.

use std::ffi::c_void;
use std::ops::Deref;
use std::ptr;

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut, DeviceRepr, SyncOnDrop};
use candle_core::{DType, Layout, Shape, Storage, Tensor};
use s2o_kernels::params::{ROW_THRESHOLD_BYTES, RowIndex, RowParams};
use s2o_kernels::{Dtype, Function, Kernel, decoder, selection};

use super::error::{CudaError, int};
use super::fused::{ANY_HEAD_DIM, Launcher, address, tensor};
use crate::error::AttnError;

/// Long rows that are chosen from at a time: what is known of them on the way takes 75 MB then.
const LONG_ROWS: usize = 4096;

/// How much of each row is chosen.
#[derive(Debug, Clone, Copy)]
pub enum Wanted<'a> {
    /// The greatest entries until they hold a share of the row's sum, the one that reaches it included: one share for each
    /// of as many equal groups of consecutive rows. Zeros are not chosen; a share of 1 or more chooses all that is seen.
    Shares(&'a [f64]),
    /// The greatest entries, as many as f32 of the shape of the scores with a last dimension of 1 says.
    Counts(&'a Tensor),
}

/// What a choice from rows knows beside the scores. Tensors are broadcast to the leading dimensions of the scores, of
/// which they have consecutive ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct RowChoice<'a> {
    /// The choice is made from the softmax of the scores times this.
    pub softmax: Option<f32>,
    /// u32, 4 in the last dimension: columns seen, from the first on; and of them taken whatever they score the first so
    /// many, and those from a column on, to another. What is not seen is never chosen.
    pub bounds: Option<&'a Tensor>,
    /// u8, a row each: where 0, an entry has no part in softmax, sum or count, and is taken if it is seen.
    pub trusted: Option<&'a Tensor>,
    /// u8, a row each: where not 0, an entry is taken if it is seen.
    pub kept: Option<&'a Tensor>,
    /// What is taken by `bounds` or `kept` counts first. Otherwise it is taken beside the choice.
    pub kept_first: bool,
    /// u8, 1 in the last dimension: where not 0, all that the row sees is taken.
    pub whole: Option<&'a Tensor>,
    /// u8, 1 in the last dimension: where 0, of the row nothing is chosen beside what is taken.
    pub asked: Option<&'a Tensor>,
    /// Columns 2i and 2i + 1 become one of the mask, chosen if either is.
    pub in_pairs: bool,
}

impl RowChoice<'_> {
    /// Chooses from every row (last dimension) of `scores`, f32 on a GPU, non-negative unless there is a softmax: a mask of
    /// u8, 1 where an entry is chosen. Equal entries are chosen together. Rows of any length up to 2^30.
    ///
    /// # Errors
    /// If the tensors are not such, or the GPU fails.
    pub fn choose(&self, scores: &Tensor, wanted: Wanted<'_>) -> Result<Tensor, AttnError> {
        let rows = Rows::of(scores)?;
        let mut dims = scores.dims().to_vec();
        let columns = if self.in_pairs { rows.row_len.div_ceil(2) } else { rows.row_len };
        *dims.last_mut().expect("rows have a dimension") = columns;
        let shape = Shape::from(dims);
        if rows.rows == 0 {
            return Ok(Tensor::zeros(shape, DType::U8, scores.device())?);
        }
        let is_long = rows.row_len > selection::BLOCK_ENTRIES;
        let hidden_by = Operands {
            bounds: rows.operand(scores, self.bounds, DType::U32, 4)?,
            trusted: rows.operand(scores, self.trusted, DType::U8, rows.row_len)?,
            ..Operands::default()
        };
        let softened = match self.softmax {
            Some(scale) if is_long => Some(softmax(scores, &rows, &hidden_by, scale)?),
            _ => None,
        };
        let scores = softened.as_ref().unwrap_or(scores);
        let (left_out, counts) = match wanted {
            Wanted::Shares(shares) => (Some(rows.left_out(scores, shares)?), None),
            Wanted::Counts(counts) => (None, Some(rows.counts(scores, counts)?)),
        };
        let operands = Operands {
            left_out,
            counts,
            kept: rows.operand(scores, self.kept, DType::U8, rows.row_len)?,
            whole: rows.operand(scores, self.whole, DType::U8, 1)?,
            asked: rows.operand(scores, self.asked, DType::U8, 1)?,
            ..hidden_by
        };
        let launcher = Launcher::of(scores)?;
        let mut mask = launcher.uninit::<u8>(&shape)?;
        let mut cuts = match is_long {
            true => Some(launcher.device.alloc_zeros::<u8>(rows.rows.min(LONG_ROWS) * ROW_THRESHOLD_BYTES)?),
            false => None,
        };
        with_params(&launcher, scores, &rows, &operands, |params| {
            let (mask, _mask) = mask.device_ptr_mut(&launcher.stream);
            let cuts = cuts.as_mut().map(|cuts| cuts.device_ptr_mut(&launcher.stream));
            let softmax = self.softmax.filter(|_| !is_long);
            let params = RowParams {
                mask: mask as *mut u8,
                thresholds: cuts.as_ref().map_or(ptr::null_mut(), |(cuts, _)| *cuts as *mut c_void),
                softmax: i32::from(softmax.is_some()),
                scale: softmax.unwrap_or(1.0),
                forced_count_first: i32::from(self.kept_first),
                merged_columns: if self.in_pairs { 2 } else { 1 },
                ..params
            };
            if !is_long {
                let blocks = selection::row_blocks(rows.rows, rows.row_len);
                // SAFETY: threads for each row of tensors that fit them, held until the launch is enqueued.
                return unsafe { launcher.launch(function(Kernel::RowChoice), &params, [blocks, 1, 1], None) };
            }
            for first in (0..rows.rows).step_by(LONG_ROWS) {
                let count = LONG_ROWS.min(rows.rows - first);
                let blocks = selection::long_row_blocks(count, rows.row_len);
                for pass in 0..selection::LONG_PASSES {
                    let params =
                        RowParams { first_row: int("rows", first)?, rows: int("rows", count)?, pass, ..params };
                    // SAFETY: as above, with a cut for each row, and every pass behind the one before.
                    unsafe { launcher.launch(function(Kernel::RowChoiceLong), &params, [blocks, 1, 1], None) }?;
                }
            }
            Ok(())
        })?;
        Ok(tensor(mask, &launcher.device, shape))
    }
}

/// Softmax over every row (last dimension) of `scores`, f32 on a GPU, times `scale`. `bounds` as in [`RowChoice`]: zeros
/// where a row does not see its columns, also in rows that see none.
///
/// # Errors
/// If the tensors are not such, or the GPU fails.
pub fn row_softmax(scores: &Tensor, scale: f32, bounds: Option<&Tensor>) -> Result<Tensor, AttnError> {
    let rows = Rows::of(scores)?;
    if rows.rows == 0 {
        return Ok(scores.clone());
    }
    let bounds = rows.operand(scores, bounds, DType::U32, 4)?;
    softmax(scores, &rows, &Operands { bounds, ..Operands::default() }, scale)
}

fn softmax(scores: &Tensor, rows: &Rows, operands: &Operands, scale: f32) -> Result<Tensor, AttnError> {
    let launcher = Launcher::of(scores)?;
    let mut weights = launcher.uninit::<f32>(scores.shape())?;
    with_params(&launcher, scores, rows, operands, |params| {
        let (weights, _weights) = weights.device_ptr_mut(&launcher.stream);
        let params = RowParams { weights: weights as *mut f32, softmax: 1, scale, ..params };
        let blocks = selection::row_blocks(rows.rows, rows.row_len);
        // SAFETY: threads for each row of tensors that fit them, held until the launch is enqueued.
        unsafe { launcher.launch(function(Kernel::RowSoftmax), &params, [blocks, 1, 1], None) }
    })?;
    Ok(tensor(weights, &launcher.device, scores.shape().clone()))
}

/// The row kernels see no elements.
fn function(kernel: Kernel) -> Function {
    Function::new(kernel, Dtype::Bf16, ANY_HEAD_DIM)
}

/// The tensor, or a copy that lies as the kernels' accesses want it, if it is of this dtype and on the device of `like`.
pub(super) fn aligned(x: &Tensor, like: &Tensor, expected: DType) -> Result<Tensor, AttnError> {
    if x.dtype() != expected {
        let msg = "operand of a selection";
        return Err(candle_core::Error::UnexpectedDType { msg, expected, got: x.dtype() }.bt().into());
    }
    if !x.device().same_device(like.device()) {
        let (lhs, rhs) = (like.device().location(), x.device().location());
        return Err(candle_core::Error::DeviceMismatchBinaryOp { lhs, rhs, op: "selection" }.bt().into());
    }
    let in_place = x.is_contiguous() && x.layout().start_offset().is_multiple_of(decoder::VECTOR);
    Ok(if in_place { x.clone() } else { x.force_contiguous()? })
}

/// An operand that rows share.
struct Operand {
    tensor: Tensor,
    index: RowIndex,
}

#[derive(Default)]
struct Operands {
    left_out: Option<Operand>,
    counts: Option<Operand>,
    bounds: Option<Operand>,
    trusted: Option<Operand>,
    kept: Option<Operand>,
    whole: Option<Operand>,
    asked: Option<Operand>,
}

/// The rows of a tensor.
struct Rows {
    /// Without the last dimension.
    dims: Vec<usize>,
    rows: usize,
    row_len: usize,
}

impl Rows {
    fn of(scores: &Tensor) -> Result<Self, AttnError> {
        let Some((&row_len, dims)) = scores.dims().split_last().filter(|(row_len, _)| **row_len > 0) else {
            let (name, expected) = ("scores", "rows of at least 1 entry".to_owned());
            return Err(CudaError::Keys { name, expected, got: 0 }.into());
        };
        if row_len > selection::MAX_ROW {
            return Err(CudaError::TooLarge { name: "entries of a row", max: selection::MAX_ROW, got: row_len }.into());
        }
        Ok(Self { dims: dims.to_vec(), rows: dims.iter().product(), row_len })
    }

    fn operand(
        &self,
        scores: &Tensor,
        operand: Option<&Tensor>,
        dtype: DType,
        width: usize,
    ) -> Result<Option<Operand>, AttnError> {
        let Some(operand) = operand else { return Ok(None) };
        let index = match operand.dims().split_last() {
            Some((&last, dims)) if last == width => row_index(dims, &self.dims),
            _ => None,
        };
        let Some(index) = index else { return Err(mismatch(scores, operand)) };
        Ok(Some(Operand { tensor: aligned(operand, scores, dtype)?, index }))
    }

    fn counts(&self, scores: &Tensor, counts: &Tensor) -> Result<Operand, AttnError> {
        match self.operand(scores, Some(counts), DType::F32, 1)? {
            Some(operand) if counts.elem_count() == self.rows => Ok(operand),
            _ => Err(mismatch(scores, counts)),
        }
    }

    /// The shares that need not be chosen.
    fn left_out(&self, scores: &Tensor, shares: &[f64]) -> Result<Operand, AttnError> {
        if shares.is_empty() || !self.rows.is_multiple_of(shares.len()) {
            let expected = format!("shares for equal groups of {} rows", self.rows);
            return Err(CudaError::Keys { name: "shares", expected, got: shares.len() }.into());
        }
        let left_out: Vec<f32> = shares.iter().map(|share| (1.0 - share) as f32).collect();
        let index = RowIndex { each: int("rows", self.rows / shares.len())?, count: int("shares", shares.len())? };
        Ok(Operand { tensor: Tensor::new(left_out, scores.device())?, index })
    }
}

fn mismatch(scores: &Tensor, operand: &Tensor) -> AttnError {
    let (lhs, rhs) = (scores.shape().clone(), operand.shape().clone());
    candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: "row-choice" }.bt().into()
}

/// Which entry of an operand of `dims` a row has, where the rows are of `rows`, both without the last dimension.
fn row_index(dims: &[usize], rows: &[usize]) -> Option<RowIndex> {
    if dims.len() > rows.len() {
        return None;
    }
    let (mut each, mut count, mut ended) = (1, 1, false);
    let dims = dims.iter().rev().copied().chain(std::iter::repeat(1));
    for (&of_rows, dim) in rows.iter().rev().zip(dims).filter(|(of_rows, _)| **of_rows != 1) {
        match dim {
            1 if count == 1 => each *= of_rows,
            1 => ended = true,
            _ if dim == of_rows && !ended => count *= of_rows,
            _ => return None,
        }
    }
    Some(RowIndex { each: i32::try_from(each).ok()?, count: i32::try_from(count).ok()? })
}

fn lock(operand: &Option<Operand>) -> Option<(impl Deref<Target = Storage>, &Layout)> {
    operand.as_ref().map(|operand| operand.tensor.storage_and_layout())
}

/// Where an operand lies, or null.
fn place<'a, T: CudaDType + DeviceRepr + 'static>(
    locked: &'a Option<(impl Deref<Target = Storage>, &Layout)>,
    stream: &'a CudaStream,
) -> Result<(*const T, Option<SyncOnDrop<'a>>), AttnError> {
    let Some((storage, layout)) = locked else { return Ok((ptr::null(), None)) };
    let (address, guard) = address::<T>(storage, layout, stream)?;
    Ok((address as *const T, Some(guard)))
}

/// Runs `launch` with the parameters but for what is written, while the operands are held.
fn with_params(
    launcher: &Launcher,
    scores: &Tensor,
    rows: &Rows,
    operands: &Operands,
    launch: impl FnOnce(RowParams) -> Result<(), AttnError>,
) -> Result<(), AttnError> {
    let stream = &launcher.stream;
    let scores = Some(Operand { tensor: aligned(scores, scores, DType::F32)?, index: FIRST });
    let index = |operand: &Option<Operand>| operand.as_ref().map_or(FIRST, |operand| operand.index);
    let (scores, left_out, counts) = (lock(&scores), lock(&operands.left_out), lock(&operands.counts));
    let (bounds, trusted, kept) = (lock(&operands.bounds), lock(&operands.trusted), lock(&operands.kept));
    let (whole, asked) = (lock(&operands.whole), lock(&operands.asked));
    let (scores, _scores) = place::<f32>(&scores, stream)?;
    let (left_out, _left_out) = place::<f32>(&left_out, stream)?;
    let (counts, _counts) = place::<f32>(&counts, stream)?;
    let (bounds, _bounds) = place::<u32>(&bounds, stream)?;
    let (trusted, _trusted) = place::<u8>(&trusted, stream)?;
    let (kept, _kept) = place::<u8>(&kept, stream)?;
    let (whole, _whole) = place::<u8>(&whole, stream)?;
    let (asked, _asked) = place::<u8>(&asked, stream)?;
    launch(RowParams {
        scores,
        mask: ptr::null_mut(),
        weights: ptr::null_mut(),
        left_out,
        counts,
        bounds,
        scored: trusted,
        forced: kept,
        select_all: whole,
        enabled: asked,
        thresholds: ptr::null_mut(),
        left_out_of: index(&operands.left_out),
        bounds_of: index(&operands.bounds),
        scored_of: index(&operands.trusted),
        forced_of: index(&operands.kept),
        select_all_of: index(&operands.whole),
        enabled_of: index(&operands.asked),
        row_len: int("entries of a row", rows.row_len)?,
        rows: int("rows", rows.rows)?,
        first_row: 0,
        softmax: 0,
        scale: 1.0,
        forced_count_first: 0,
        merged_columns: 1,
        pass: 0,
    })
}

/// The one entry of all rows.
const FIRST: RowIndex = RowIndex { each: 1, count: 1 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_broadcast_over_consecutive_dimensions() {
        let index = |dims: &[usize], rows: &[usize]| row_index(dims, rows).map(|index| (index.each, index.count));
        let rows = [2, 3, 5];
        assert_eq!(index(&[2, 3, 5], &rows), Some((1, 30)));
        assert_eq!(index(&[5], &rows), Some((1, 5)));
        assert_eq!(index(&[2, 3, 1], &rows), Some((5, 6)));
        assert_eq!(index(&[1, 3, 1], &rows), Some((5, 3)));
        assert_eq!(index(&[], &rows), Some((30, 1)));
        assert_eq!(index(&[2, 1, 5], &rows), None, "not consecutive");
        assert_eq!(index(&[4], &rows), None, "another size");
        assert_eq!(index(&[2, 2, 3, 5], &rows), None, "more dimensions");
        assert_eq!(index(&[7, 1, 4], &[7, 1, 4]), Some((1, 28)));
    }
}
