//! [`Matrix`]: a linear layer's weight, of which a rank may read only its part.

use std::cell::OnceCell;
use std::ops::Range;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use safetensors::slice::IndexOp;

use crate::error::Result;
use crate::fused::Linear;
use crate::layers::Weights;

/// A linear layer that is read when it, or a part of it, is asked for. From safetensors files only the part is read; from
/// other sources the whole is read once and kept until this value is dropped.
pub(crate) struct Matrix<'v> {
    weights: Weights<'v>,
    size_in: usize,
    size_out: usize,
    bias: bool,
    whole: OnceCell<Linear>,
}

impl<'v> Matrix<'v> {
    /// The layer of the tensors `weight` `(size_out, size_in)` and, with a bias, `bias` `(size_out,)`.
    pub(crate) fn new(weights: Weights<'v>, size_in: usize, size_out: usize, bias: bool) -> Self {
        Self { weights, size_in, size_out, bias, whole: OnceCell::new() }
    }

    /// The whole layer.
    pub(crate) fn whole(&self) -> Result<Linear> {
        if let Some(linear) = self.whole.get() {
            return Ok(linear.clone());
        }
        let linear = self.weights.linear(self.size_in, self.size_out, self.bias)?;
        Ok(self.whole.get_or_init(|| linear).clone())
    }

    /// Whether parts are taken from the whole.
    fn has_whole(&self) -> bool {
        self.whole.get().is_some() || !self.weights.has_files()
    }

    /// The layer of some outputs, in memory of its own.
    pub(crate) fn outputs(&self, range: Range<usize>) -> Result<Linear> {
        if self.has_whole() {
            return Ok(self.whole()?.outputs(range)?);
        }
        let part = |shape: &[usize], name| self.weights.part(shape, name, 0, range.clone());
        let bias = if self.bias { Some(part(&[self.size_out], "bias")?) } else { None };
        let weight = part(&[self.size_out, self.size_in], "weight")?;
        Ok(Linear::Dense(candle_nn::Linear::new(weight, bias)))
    }

    /// The layer of the outputs in some ranges, one range after the other.
    pub(crate) fn outputs_in(&self, ranges: &[Range<usize>]) -> Result<Linear> {
        let parts = ranges.iter().map(|range| self.outputs(range.clone())).collect::<Result<_>>()?;
        Ok(Linear::joined(parts, 0)?)
    }

    /// The layer of the inputs in some ranges, one range after the other. Only that with the first input has the bias.
    pub(crate) fn inputs_in(&self, ranges: &[Range<usize>]) -> Result<Linear> {
        let parts = ranges.iter().map(|range| self.inputs(range.clone())).collect::<Result<_>>()?;
        Ok(Linear::joined(parts, 1)?)
    }

    /// The layer of some inputs, in memory of its own. The sum over all parts is the output of the layer, so only the
    /// first part has the bias.
    pub(crate) fn inputs(&self, range: Range<usize>) -> Result<Linear> {
        if self.has_whole() {
            return Ok(self.whole()?.inputs(range)?);
        }
        let has_bias = self.bias && range.start == 0;
        let bias = if has_bias { Some(self.weights.tensor(&[self.size_out], "bias")?) } else { None };
        let weight = self.weights.part(&[self.size_out, self.size_in], "weight", 1, range)?;
        Ok(Linear::Dense(candle_nn::Linear::new(weight, bias)))
    }
}

/// Reads the part `range` of dimension `dim`, 0 or 1, of a tensor that must have this shape.
pub(crate) fn read_part(
    files: &MmapedSafetensors,
    name: &str,
    shape: &[usize],
    dim: usize,
    range: Range<usize>,
    dtype: DType,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let view = files.get(name)?;
    if view.shape() != shape {
        return Err(candle_core::Error::UnexpectedShape {
            msg: format!("shape mismatch for {name}"),
            expected: shape.into(),
            got: view.shape().into(),
        });
    }
    let outside = |_| {
        let message = format!("{name}: expected a range inside dimension {dim} of {shape:?}, got {range:?}");
        candle_core::Error::Msg(message)
    };
    let runs = if dim == 0 { view.slice(range.clone()) } else { view.slice((.., range.clone())) }.map_err(outside)?;
    let mut bytes = Vec::with_capacity(runs.remaining_byte_len());
    runs.for_each(|run| bytes.extend_from_slice(run));
    let mut part = shape.to_vec();
    part[dim] = range.len();
    Tensor::from_raw_buffer(&bytes, view.dtype().try_into()?, &part, device)?.to_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_nn::VarBuilder;

    use super::*;
    use crate::error::ModelError;
    use crate::fused::LinearPrecision;
    use crate::layers::Quantised;

    fn bits(x: &Tensor) -> Vec<f32> {
        x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    fn dense(linear: Linear) -> candle_nn::Linear {
        match linear {
            Linear::Dense(linear) => linear,
            other => panic!("expected a dense layer, got {other:?}"),
        }
    }

    #[test]
    fn a_part_is_read_alone_and_is_that_of_the_whole() {
        let numbers = |from: f32, len: usize| Tensor::arange(from, from + len as f32, &Device::Cpu).unwrap();
        let (weight, bias) = (numbers(0.0, 48).reshape((6, 8)).unwrap(), numbers(100.0, 6));
        let tensors = HashMap::from([("a.weight".to_owned(), weight.clone()), ("a.bias".to_owned(), bias.clone())]);
        let file = tempfile::NamedTempFile::new().unwrap();
        candle_core::safetensors::save(&tensors, file.path()).unwrap();
        // SAFETY: nothing else writes the file.
        let files = unsafe { MmapedSafetensors::multi(&[file.path()]).unwrap() };
        let quantised = Quantised::new();
        for dtype in [DType::F32, DType::BF16] {
            let vb = VarBuilder::from_tensors(tensors.clone(), dtype, &Device::Cpu);
            let weights = Weights::new(vb, &quantised, LinearPrecision::AsRead).with_files(Some(&files));
            let expect = |got: Linear, weight: &Tensor, bias: Option<&Tensor>| {
                let got = dense(got);
                assert_eq!(got.weight().dims(), weight.dims());
                assert_eq!(got.weight().dtype(), dtype);
                assert_eq!(bits(got.weight()), bits(&weight.to_dtype(dtype).unwrap()));
                assert_eq!(got.bias().map(bits), bias.map(|bias| bits(&bias.to_dtype(dtype).unwrap())));
            };
            let matrix = weights.matrix("a", 8, 6, true);
            let some = (weight.narrow(0, 2, 3).unwrap(), bias.narrow(0, 2, 3).unwrap());
            expect(matrix.outputs(2..5).unwrap(), &some.0, Some(&some.1));
            expect(matrix.inputs(4..8).unwrap(), &weight.narrow(1, 4, 4).unwrap(), None);
            expect(matrix.inputs(0..4).unwrap(), &weight.narrow(1, 0, 4).unwrap(), Some(&bias));
            assert!(matrix.whole.get().is_none(), "only the parts are read");
            expect(matrix.whole().unwrap(), &weight, Some(&bias));
            assert!(matrix.has_whole());
            expect(matrix.outputs(2..5).unwrap(), &some.0, Some(&some.1));
            expect(matrix.inputs(4..8).unwrap(), &weight.narrow(1, 4, 4).unwrap(), None);
            expect(weights.matrix("a", 8, 6, false).outputs(0..1).unwrap(), &weight.narrow(0, 0, 1).unwrap(), None);

            let wrong = weights.matrix("a", 4, 6, false).outputs(0..3).unwrap_err();
            assert!(matches!(wrong, ModelError::WrongShape { name, expected, got }
                if name == "a.weight" && expected == [6, 4] && got == [6, 8]));
            let missing = weights.matrix("b", 8, 6, false).inputs(0..3).unwrap_err();
            assert!(matches!(missing, ModelError::MissingTensor { name } if name == "b.weight"), "names the tensor");
            let outside = weights.matrix("a", 8, 6, false).inputs(6..9).unwrap_err().to_string();
            let expected = "a.weight: expected a range inside dimension 1 of [6, 8], got 6..9";
            assert!(outside.contains(expected), "{outside}");
        }
    }
}
