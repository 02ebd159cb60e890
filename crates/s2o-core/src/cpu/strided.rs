//! Tensors with any strides, of type f32, f16 or bf16, read as f32.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::microkernel::prefetch;
use crate::error::S2oError;
use crate::score_scale::ScoreScale;
use crate::shape::{AttnShape, ShapeError};

/// Element types of the CPU path: `f32`, `f16`, `bf16`. All arithmetic is in f32.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// Widens `src` into `dst` of the same length.
    fn widen(src: &[Self], dst: &mut [f32]);
    /// Rounds `src` to nearest into `dst` of the same length.
    fn narrow(src: &[f32], dst: &mut [Self]);
}

impl Element for f32 {
    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
}

impl Element for f16 {
    fn widen(src: &[Self], dst: &mut [f32]) {
        src.convert_to_f32_slice(dst);
    }
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.convert_from_f32_slice(src);
    }
}

impl Element for bf16 {
    fn widen(src: &[Self], dst: &mut [f32]) {
        // One shift per element is simpler to vectorise than the general conversion.
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
        }
    }
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.convert_from_f32_slice(src);
    }
}

/// A tensor (batch, length, heads, head_dim) in a borrowed buffer.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T> {
    data: &'a [T],
    dims: [usize; 4],
    strides: [usize; 4],
}

impl<'a, T: Element> Strided<'a, T> {
    /// A tensor whose element `(b, s, h, d)` is at `b * strides[0] + s * strides[1] + h * strides[2] + d * strides[3]`
    /// of `data`. `name` is the tensor's name in errors.
    ///
    /// # Errors
    /// [`ShapeError::Buffer`] if the strides reach beyond `data`.
    pub fn new(name: &'static str, data: &'a [T], dims: [usize; 4], strides: [usize; 4]) -> Result<Self, ShapeError> {
        let reach = dims
            .iter()
            .zip(strides)
            .try_fold(1usize, |reach, (&dim, stride)| reach.checked_add(dim.saturating_sub(1).checked_mul(stride)?));
        let empty = dims.contains(&0);
        match reach {
            Some(expected) if empty || expected <= data.len() => Ok(Self { data, dims, strides }),
            _ => Err(ShapeError::Buffer { name, expected: reach.unwrap_or(usize::MAX), got: data.len() }),
        }
    }

    /// A contiguous tensor.
    ///
    /// # Errors
    /// [`ShapeError::Buffer`] if `data` is too short.
    pub fn contiguous(name: &'static str, data: &'a [T], dims: [usize; 4]) -> Result<Self, ShapeError> {
        let [_, s, h, d] = dims;
        Self::new(name, data, dims, [s * h * d, h * d, d, 1])
    }

    /// Reads the heads at `positions` into consecutive rows of `dst`, each `head_dim` long. Returns the part of `dst`
    /// that holds them.
    pub(super) fn gather<'b>(
        &self,
        (batch, head): (usize, usize),
        positions: impl ExactSizeIterator<Item = usize> + Clone,
        dst: &'b mut [f32],
    ) -> &'b [f32] {
        /// Number of rows between the prefetch of a row and its use: enough to hide the memory latency.
        const AHEAD: usize = 12;
        let [_, _, _, head_dim] = self.dims;
        let len = positions.len();
        let mut ahead = positions.clone().skip(AHEAD);
        for (position, row) in positions.zip(dst.chunks_exact_mut(head_dim)) {
            if let (Some(next), 1) = (ahead.next(), self.strides[3]) {
                prefetch(&self.data[self.offset(batch, next, head)..][..head_dim]);
            }
            self.read(batch, position, head, row);
        }
        &dst[..len * head_dim]
    }

    fn offset(&self, batch: usize, position: usize, head: usize) -> usize {
        batch * self.strides[0] + position * self.strides[1] + head * self.strides[2]
    }

    /// Reads the head `(batch, position, head)` into `dst`.
    pub(super) fn read(&self, batch: usize, position: usize, head: usize, dst: &mut [f32]) {
        let start = self.offset(batch, position, head);
        if self.strides[3] == 1 {
            T::widen(&self.data[start..start + dst.len()], dst);
        } else {
            for (d, dst) in dst.iter_mut().enumerate() {
                T::widen(&self.data[start + d * self.strides[3]..][..1], std::slice::from_mut(dst));
            }
        }
    }
}

/// The operands of one attention call, checked against each other.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    pub(super) q: Strided<'a, T>,
    pub(super) k: Strided<'a, T>,
    pub(super) v: Strided<'a, T>,
    pub(super) shape: AttnShape,
    pub(super) scale: ScoreScale,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Takes `q` (batch, q_len, num_heads, head_dim) and `k`, `v` (batch, k_len, num_kv_heads, head_dim).
    ///
    /// # Errors
    /// If the sizes do not fit each other or are not supported, or [`ScoreScale::checked`] refuses the scale.
    pub fn new(
        q: Strided<'a, T>,
        k: Strided<'a, T>,
        v: Strided<'a, T>,
        scale: impl Into<ScoreScale>,
    ) -> Result<Self, S2oError> {
        let shape = AttnShape::of(q.dims, k.dims, v.dims)?;
        Ok(Self { q, k, v, shape, scale: scale.into().checked()? })
    }

    /// Index of the output row of a query, in (batch, q_len, num_heads).
    pub(super) fn output_row(&self, batch: usize, row: usize, head: usize) -> usize {
        (batch * self.shape.q_len() + row) * self.shape.num_heads() + head
    }

    /// The sizes of the call.
    pub fn shape(&self) -> &AttnShape {
        &self.shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_must_stay_inside_the_buffer() {
        let data = [0.0f32; 24];
        assert!(Strided::new("q", &data, [1, 3, 1, 8], [24, 8, 8, 1]).is_ok());
        assert_eq!(
            Strided::new("q", &data, [1, 4, 1, 8], [24, 8, 8, 1]).unwrap_err(),
            ShapeError::Buffer { name: "q", expected: 32, got: 24 }
        );
        assert!(Strided::new("q", &data, [2, 2, 2, 2], [usize::MAX, 1, 1, 1]).is_err());
    }

    #[test]
    fn half_types_round_trip() {
        let wide = [0.0f32, -1.5, 65504.0, 0.333_251_95, f32::INFINITY, 3.0, 1e-3, 7.0];
        let mut half = [f16::default(); 8];
        f16::narrow(&wide, &mut half);
        let mut back = [0.0; 8];
        f16::widen(&half, &mut back);
        assert_eq!(back[..6], wide[..6]);
        let (mut brain, mut back) = ([bf16::default(); 8], [0.0; 8]);
        bf16::narrow(&wide, &mut brain);
        bf16::widen(&brain, &mut back);
        assert_eq!(back[..2], wide[..2]);
        assert!((back[2] / wide[2] - 1.0).abs() < 1.0 / 256.0);
    }
}
