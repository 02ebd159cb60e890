//! Keys and values in 8 bits: whole numbers from -127 to 127, with one scale for each row of a head.

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
use super::{supports, supports_head_dim};

/// The code of zero.
const ZERO: f64 = 128.0;
/// The largest entry of a row divided by its scale.
const MOST: f64 = 127.0;
/// Rows whose largest entry is below this are zeros, because their factor would be infinite.
const LEAST: f64 = 1e-30;

/// The keys or the values of a layer, `(batch, capacity, num_kv_heads, head_dim)`, in 8 bits: an entry is its code minus
/// 128, times the scale of its row. Rounding to a code changes an entry by at most 1/254 of the largest entry of its row.
/// A row with an entry that is NaN or infinite is NaN.
#[derive(Debug)]
pub struct Int8Rows {
    codes: Tensor,
    scales: Tensor,
}

impl Int8Rows {
    /// Allocates rows `(batch, capacity, num_kv_heads, head_dim)` of zeros.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn zeros(shape: (usize, usize, usize, usize), device: &Device) -> Result<Self> {
        let (batch, capacity, heads, _) = shape;
        Ok(Self {
            codes: Tensor::zeros(shape, DType::U8, device)?,
            scales: Tensor::zeros((batch, heads, capacity), DType::F32, device)?,
        })
    }

    /// Codes `(batch, capacity, num_kv_heads, head_dim)` u8, from 1 to 255.
    pub fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// Scales `(batch, num_kv_heads, capacity)` f32.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Bytes of one row of a head.
    pub fn row_bytes(head_dim: usize) -> usize {
        head_dim + DType::F32.size_in_bytes()
    }

    /// Some of the sequences, in the same memory.
    ///
    /// # Errors
    /// If a sequence does not exist.
    pub fn sequences(&self, range: &Range<usize>) -> Result<Self> {
        let some = |x: &Tensor| x.narrow(0, range.start, range.len());
        Ok(Self { codes: some(&self.codes)?, scales: some(&self.scales)? })
    }

    /// Stores the rows of positions `range` of `rows` `(batch, capacity, num_kv_heads, head_dim)`, and rounds them in
    /// `rows` to what was stored.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn store(&self, rows: &Tensor, range: Range<usize>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if supports(rows.device(), rows.dtype()) && supports_head_dim(rows.dim(D::Minus1)?) {
            return Ok(cuda::store(self, rows, range)?);
        }
        let x = rows.narrow(1, range.start, range.len())?.to_dtype(DType::F32)?;
        let most = x.abs()?.max_keepdim(D::Minus1)?;
        // 0, or NaN.
        let not_finite = (&x * 0.0)?.sum_keepdim(D::Minus1)?;
        let scales = ((&most * f64::from(1.0 / MOST as f32))? + not_finite)?;
        let factors = (most.maximum(LEAST)?.recip()? * MOST)?;
        let codes = (x.broadcast_mul(&factors)? + (ZERO + 0.5))?.floor()?.to_dtype(DType::U8)?;
        rows.slice_set(&restored(&codes, &scales, rows.dtype())?, 1, range.start)?;
        self.codes.slice_set(&codes, 1, range.start)?;
        self.scales.slice_set(&scales.squeeze(D::Minus1)?.transpose(1, 2)?.contiguous()?, 2, range.start)
    }

    /// Writes the stored rows of positions `range` to the same rows of `rows`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn load(&self, rows: &Tensor, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if supports(rows.device(), rows.dtype()) && supports_head_dim(rows.dim(D::Minus1)?) {
            return Ok(cuda::load(self, rows, range)?);
        }
        let codes = self.codes.narrow(1, range.start, range.len())?;
        let scales = self.scales.narrow(2, range.start, range.len())?.transpose(1, 2)?.unsqueeze(D::Minus1)?;
        rows.slice_set(&restored(&codes, &scales, rows.dtype())?, 1, range.start)
    }
}

/// The entries of codes `(.., head_dim)` with scales `(.., 1)`.
fn restored(codes: &Tensor, scales: &Tensor, dtype: DType) -> Result<Tensor> {
    (codes.to_dtype(DType::F32)? - ZERO)?.broadcast_mul(scales)?.to_dtype(dtype)?.contiguous()
}

/// Attention of one query per sequence, `(batch, 1, num_heads, head_dim)`, on the first `len` positions of keys and
/// values in 8 bits. The result is that of [`crate::decode_attn`] on the loaded rows, bit for bit, and half of the bytes
/// are read. `None` without a kernel for this device, dtype and head size: load the rows then.
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn decode_attn_int8(q: &Tensor, [k, v]: [&Int8Rows; 2], len: usize, softmax_scale: f32) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if supports(q.device(), q.dtype()) && supports_head_dim(q.dim(D::Minus1)?) {
        return Ok(Some(cuda::decode(&q.contiguous()?, [k, v], len, softmax_scale)?));
    }
    let _ = (q, k, v, len, softmax_scale);
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(values: &[[f32; 4]]) -> Tensor {
        Tensor::from_vec(values.concat(), (1, values.len(), 1, 4), &Device::Cpu).unwrap()
    }

    fn stored(values: &[[f32; 4]]) -> (Int8Rows, Vec<f32>) {
        let rows = rows(values);
        let int8 = Int8Rows::zeros(rows.dims4().unwrap(), &Device::Cpu).unwrap();
        int8.store(&rows, 0..values.len()).unwrap();
        (int8, rows.flatten_all().unwrap().to_vec1().unwrap())
    }

    #[test]
    fn entries_are_rounded_to_whole_parts_of_the_largest() {
        let (int8, rounded) = stored(&[[127.0, -127.0, 0.4, -0.6], [0.0, 0.5, 0.25, -0.5], [0.0; 4]]);
        let codes: Vec<u8> = int8.codes.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(codes, [255, 1, 128, 127, 128, 255, 192, 1, 128, 128, 128, 128]);
        let scales: Vec<f32> = int8.scales.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(scales, [1.0, 0.5 / 127.0, 0.0]);
        assert_eq!(rounded[..4], [127.0, -127.0, 0.0, -1.0]);
        assert!((rounded[6] - 0.25).abs() <= 0.5 / 254.0);
        assert_eq!(rounded[8..], [0.0; 4]);
    }

    #[test]
    fn loaded_rows_are_the_rounded_ones() {
        let values = [[0.3, -1.7, 2.2, 0.01], [5.0, 4.0, 3.0, 2.0], [-0.001, 0.002, 0.0, 0.0007]];
        let (int8, rounded) = stored(&values);
        let out = Tensor::ones((1, 3, 1, 4), DType::F32, &Device::Cpu).unwrap();
        int8.load(&out, 0..2).unwrap();
        let got: Vec<f32> = out.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(got[..8], rounded[..8]);
        assert_eq!(got[8..], [1.0; 4], "rows outside of the range stay");
        // What was rounded once stays.
        let again = rows(&values);
        int8.load(&again, 0..3).unwrap();
        int8.store(&again, 1..3).unwrap();
        assert_eq!(again.flatten_all().unwrap().to_vec1::<f32>().unwrap(), rounded);
    }

    #[test]
    fn a_row_that_is_not_finite_stays_so_and_harms_no_other() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (int8, rounded) = stored(&[[1.0, bad, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]);
            assert!(rounded[..4].iter().all(|x| x.is_nan()), "{rounded:?}");
            assert!(rounded[4..].iter().all(|x| x.is_finite()), "{rounded:?}");
            let out = rows(&[[0.0; 4]; 2]);
            int8.load(&out, 0..2).unwrap();
            assert!(out.flatten_all().unwrap().to_vec1::<f32>().unwrap()[..4].iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn heads_and_sequences_keep_their_scales() {
        let shape = (2, 3, 2, 4);
        let values: Vec<f32> = (0..48).map(|i| (i * i % 37) as f32 - 11.0).collect();
        let rows = Tensor::from_vec(values.clone(), shape, &Device::Cpu).unwrap();
        let int8 = Int8Rows::zeros(shape, &Device::Cpu).unwrap();
        int8.store(&rows, 0..3).unwrap();
        let rounded: Vec<f32> = rows.flatten_all().unwrap().to_vec1().unwrap();
        for (row, (x, y)) in values.chunks(4).zip(rounded.chunks(4)).enumerate() {
            let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(x.iter().zip(y).all(|(x, y)| (x - y).abs() <= most / 253.0), "row {row}: {x:?} {y:?}");
        }
        // The second sequence alone, in its own tensor.
        let second = Tensor::zeros((1, 3, 2, 4), DType::F32, &Device::Cpu).unwrap();
        int8.sequences(&(1..2)).unwrap().load(&second, 0..3).unwrap();
        assert_eq!(second.flatten_all().unwrap().to_vec1::<f32>().unwrap(), rounded[24..]);
    }
}
