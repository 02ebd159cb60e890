//! Softmax of rows of scores and choices from them: the launches of the row kernels.

use std::ffi::c_void;
use std::ops::Deref;
use std::ptr;

use candle_core::{DType, Layout, Shape, Storage, Tensor};
use cudarc::driver::{CudaStream, DevicePtrMut, SyncOnDrop};
use s2o_cuda::{ANY_HEAD_DIM, CudaError, Grid, Launcher, address, to_i32};
use s2o_kernels::params::{ROW_THRESHOLD_BYTES, RowIndex, RowParams};
use s2o_kernels::{Dtype, Function, Kernel, selection};

use super::{aligned, shape_mismatch};
use crate::row_choice::{RowChoice, Select};

/// Long rows per launch: their intermediate results take 75 MB.
const LONG_ROWS: usize = 4096;

/// [`RowChoice::choose`] for f32 scores on a GPU, in rows of up to 2^30 entries. Equal entries are chosen together.
pub(crate) fn choose(choice: &RowChoice<'_>, scores: &Tensor, select: Select<'_>) -> Result<Tensor, CudaError> {
    let rows = Rows::of(scores)?;
    let mut dims = scores.dims().to_vec();
    let columns = if choice.merge_pairs { rows.row_len.div_ceil(2) } else { rows.row_len };
    *dims.last_mut().expect("rows have a dimension") = columns;
    let shape = Shape::from(dims);
    if rows.rows == 0 {
        return Ok(Tensor::zeros(shape, DType::U8, scores.device())?);
    }
    let is_long = rows.row_len > selection::BLOCK_ENTRIES;
    let bounds = rows.operand(scores, choice.bounds, DType::U32, 4)?;
    let scored = rows.operand(scores, choice.scored, DType::U8, rows.row_len)?;
    let softened = match choice.softmax {
        Some(scale) if is_long => {
            let operands = Operands { bounds: bounds.clone(), scored: scored.clone(), ..Operands::default() };
            Some(softmax(scores, &rows, operands, scale)?)
        }
        _ => None,
    };
    let scores = softened.as_ref().unwrap_or(scores);
    let (left_out, counts) = match select {
        Select::TopP(shares) => (Some(rows.left_out(scores, shares)?), None),
        Select::TopK(counts) => (None, Some(rows.counts(scores, counts)?)),
    };
    let operands = Operands {
        left_out,
        counts,
        bounds,
        scored,
        forced: rows.operand(scores, choice.forced, DType::U8, rows.row_len)?,
        select_all: rows.operand(scores, choice.select_all, DType::U8, 1)?,
        enabled: rows.operand(scores, choice.enabled, DType::U8, 1)?,
    };
    let launcher = Launcher::of(scores)?;
    let mut mask = launcher.uninit::<u8>(&shape)?;
    let mut thresholds = match is_long {
        true => Some(launcher.zeros::<u8>(rows.rows.min(LONG_ROWS) * ROW_THRESHOLD_BYTES)?),
        false => None,
    };
    with_params(&launcher, scores, &rows, operands, |params| {
        let (mask, _mask) = mask.device_ptr_mut(launcher.stream());
        let thresholds = thresholds.as_mut().map(|thresholds| thresholds.device_ptr_mut(launcher.stream()));
        let softmax = choice.softmax.filter(|_| !is_long);
        let params = RowParams {
            mask: mask as *mut u8,
            thresholds: thresholds.as_ref().map_or(ptr::null_mut(), |(address, _)| *address as *mut c_void),
            softmax: i32::from(softmax.is_some()),
            scale: softmax.unwrap_or(1.0),
            forced_count_first: i32::from(choice.forced_count_first),
            merged_columns: if choice.merge_pairs { 2 } else { 1 },
            ..params
        };
        if !is_long {
            let grid = Grid::Blocks([selection::row_blocks(rows.rows, rows.row_len), 1, 1]);
            // SAFETY: the grid covers the rows; the tensors fit them and are held until the launch is enqueued.
            return unsafe { launcher.launch(function(Kernel::RowChoice), &params, grid) };
        }
        for first in (0..rows.rows).step_by(LONG_ROWS) {
            let count = LONG_ROWS.min(rows.rows - first);
            let grid = Grid::Blocks([selection::long_row_blocks(count, rows.row_len), 1, 1]);
            for pass in 0..selection::LONG_PASSES {
                let params =
                    RowParams { first_row: to_i32("rows", first)?, rows: to_i32("rows", count)?, pass, ..params };
                // SAFETY: as above; each row has a threshold, and the passes run in order.
                unsafe { launcher.launch(function(Kernel::RowChoiceLong), &params, grid) }?;
            }
        }
        Ok(())
    })?;
    Ok(launcher.tensor(mask, shape))
}

/// Softmax over every row (last dimension) of `scale * scores`, f32 on a GPU. `bounds` is as in [`RowChoice`]: entries
/// that a row does not see become 0, and a row that sees none becomes all zeros.
///
/// # Errors
/// If a shape, dtype or device does not fit, a row has more than 2^30 entries, or the GPU fails.
pub fn row_softmax(scores: &Tensor, scale: f32, bounds: Option<&Tensor>) -> Result<Tensor, CudaError> {
    let rows = Rows::of(scores)?;
    if rows.rows == 0 {
        return Ok(scores.clone());
    }
    let bounds = rows.operand(scores, bounds, DType::U32, 4)?;
    softmax(scores, &rows, Operands { bounds, ..Operands::default() }, scale)
}

fn softmax(scores: &Tensor, rows: &Rows, operands: Operands, scale: f32) -> Result<Tensor, CudaError> {
    let launcher = Launcher::of(scores)?;
    let mut weights = launcher.uninit::<f32>(scores.shape())?;
    with_params(&launcher, scores, rows, operands, |params| {
        let (weights, _weights) = weights.device_ptr_mut(launcher.stream());
        let params = RowParams { weights: weights as *mut f32, softmax: 1, scale, ..params };
        let grid = Grid::Blocks([selection::row_blocks(rows.rows, rows.row_len), 1, 1]);
        // SAFETY: the grid covers the rows; the tensors fit them and are held until the launch is enqueued.
        unsafe { launcher.launch(function(Kernel::RowSoftmax), &params, grid) }
    })?;
    Ok(launcher.tensor(weights, scores.shape().clone()))
}

/// The row kernels do not depend on element types or head sizes.
fn function(kernel: Kernel) -> Function {
    Function::new(kernel, Dtype::Bf16, ANY_HEAD_DIM)
}

/// A tensor that holds one entry per row, and the index that finds it.
#[derive(Clone)]
struct Operand {
    tensor: Tensor,
    index: RowIndex,
}

#[derive(Default)]
struct Operands {
    left_out: Option<Operand>,
    counts: Option<Operand>,
    bounds: Option<Operand>,
    scored: Option<Operand>,
    forced: Option<Operand>,
    select_all: Option<Operand>,
    enabled: Option<Operand>,
}

/// Sizes of the rows of a tensor.
struct Rows {
    /// Dimensions without the last.
    dims: Vec<usize>,
    rows: usize,
    row_len: usize,
}

impl Rows {
    fn of(scores: &Tensor) -> Result<Self, CudaError> {
        let Some((&row_len, dims)) = scores.dims().split_last().filter(|(row_len, _)| **row_len > 0) else {
            let (name, expected) = ("scores", "rows of at least 1 entry".to_owned());
            return Err(CudaError::Size { name, expected, got: 0 });
        };
        if row_len > selection::MAX_ROW {
            return Err(CudaError::TooLarge { name: "entries of a row", max: selection::MAX_ROW, got: row_len });
        }
        Ok(Self { dims: dims.to_vec(), rows: dims.iter().product(), row_len })
    }

    fn operand(
        &self,
        scores: &Tensor,
        operand: Option<&Tensor>,
        dtype: DType,
        width: usize,
    ) -> Result<Option<Operand>, CudaError> {
        let Some(operand) = operand else { return Ok(None) };
        let index = match operand.dims().split_last() {
            Some((&last, dims)) if last == width => row_index(dims, &self.dims),
            _ => None,
        };
        let Some(index) = index else { return Err(shape_mismatch(scores, operand, "row-choice")) };
        Ok(Some(Operand { tensor: aligned(operand, scores, dtype)?, index }))
    }

    fn counts(&self, scores: &Tensor, counts: &Tensor) -> Result<Operand, CudaError> {
        match self.operand(scores, Some(counts), DType::F32, 1)? {
            Some(operand) if counts.elem_count() == self.rows => Ok(operand),
            _ => Err(shape_mismatch(scores, counts, "row-choice")),
        }
    }

    /// For each of equal groups of rows, the share of a row's sum that need not be chosen.
    fn left_out(&self, scores: &Tensor, shares: &[f64]) -> Result<Operand, CudaError> {
        let left_out: Vec<f32> = shares.iter().map(|share| (1.0 - share) as f32).collect();
        let index =
            RowIndex { each: to_i32("rows", self.rows / shares.len())?, count: to_i32("shares", shares.len())? };
        Ok(Operand { tensor: Tensor::new(left_out, scores.device())?, index })
    }
}

/// The entry of an operand of `dims` that each row of `rows` uses, both without the last dimension. `None` unless the
/// operand has consecutive dimensions of the rows.
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

/// The address of a contiguous operand, and a guard that ends the stream's use of it when dropped.
fn address_of<'a>(
    (storage, layout): &'a (impl Deref<Target = Storage>, &Layout),
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>), CudaError> {
    match storage.dtype() {
        DType::F32 => address::<f32>(storage, layout, stream),
        DType::U32 => address::<u32>(storage, layout, stream),
        _ => address::<u8>(storage, layout, stream),
    }
}

/// Runs `launch` with all parameters but the outputs and modes, while the operands are held.
fn with_params(
    launcher: &Launcher,
    scores: &Tensor,
    rows: &Rows,
    operands: Operands,
    launch: impl FnOnce(RowParams) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let Operands { left_out, counts, bounds, scored, forced, select_all, enabled } = operands;
    let scores = Operand { tensor: aligned(scores, scores, DType::F32)?, index: FIRST };
    let operands = [Some(scores), left_out, counts, bounds, scored, forced, select_all, enabled];
    let locked = operands.each_ref().map(|operand| operand.as_ref().map(|operand| operand.tensor.storage_and_layout()));
    // The guards are held until the launch is enqueued.
    let mut guards = Vec::with_capacity(locked.len());
    let mut addresses = [0; 8];
    for (address, locked) in addresses.iter_mut().zip(&locked) {
        let Some(locked) = locked else { continue };
        let (place, guard) = address_of(locked, launcher.stream())?;
        *address = place;
        guards.push(guard);
    }
    let [scores, left_out, counts, bounds, scored, forced, select_all, enabled] = addresses;
    let indices = operands.each_ref().map(|operand| operand.as_ref().map_or(FIRST, |operand| operand.index));
    let [_, left_out_of, _, bounds_of, scored_of, forced_of, select_all_of, enabled_of] = indices;
    launch(RowParams {
        scores: scores as *const f32,
        mask: ptr::null_mut(),
        weights: ptr::null_mut(),
        left_out: left_out as *const f32,
        counts: counts as *const f32,
        bounds: bounds as *const u32,
        scored: scored as *const u8,
        forced: forced as *const u8,
        select_all: select_all as *const u8,
        enabled: enabled as *const u8,
        thresholds: ptr::null_mut(),
        left_out_of,
        bounds_of,
        scored_of,
        forced_of,
        select_all_of,
        enabled_of,
        row_len: to_i32("entries of a row", rows.row_len)?,
        rows: to_i32("rows", rows.rows)?,
        first_row: 0,
        softmax: 0,
        scale: 1.0,
        forced_count_first: 0,
        merged_columns: 1,
        pass: 0,
    })
}

/// Index with which all rows use the first entry.
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
