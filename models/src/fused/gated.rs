//! The first half of a gated MLP.

use std::borrow::Cow;

use candle_core::{Result, Tensor};

#[cfg(feature = "cuda")]
use super::products;
use super::{Int8Linear, Linear, LinearPrecision, Rows, StackedLinear, silu_mul};

/// The projections gate and up of a gated MLP, and its gate: `silu(x gate^T) * (x up^T)`.
#[derive(Debug, Clone)]
pub enum GatedLinear {
    /// The outputs of both and then the gate, or a kernel that computes both.
    Stacked(StackedLinear),
    /// In 8 bits without biases: the kernel of the product applies the gate.
    Int8(Int8Linear),
}

impl GatedLinear {
    /// Takes layers `(size, size_in)` of one input, with biases or without.
    ///
    /// # Errors
    /// As [`StackedLinear::new`] and [`Linear::in_precision`].
    pub fn new(gate: Linear, up: Linear, precision: LinearPrecision) -> Result<Self> {
        match (precision, gate.dense(), up.dense()) {
            (LinearPrecision::Int8, Some(gate), Some(up)) if gate.bias().is_none() && up.bias().is_none() => {
                Ok(Self::Int8(Int8Linear::gated(gate.weight(), up.weight())?))
            }
            _ => Ok(Self::Stacked(StackedLinear::new(vec![gate, up])?.in_precision(precision)?)),
        }
    }

    /// The gated output `(.., size)` for rows `(.., size_in)`, in their dtype.
    ///
    /// # Errors
    /// Those of the matrix product.
    pub fn forward(&self, x: &Rows) -> Result<Tensor> {
        match self {
            Self::Stacked(layers) => match Self::in_one_kernel(layers, x)? {
                Some(gated) => Ok(gated),
                None => silu_mul(layers.forward(x)?),
            },
            Self::Int8(layer) => layer.forward(x),
        }
    }

    /// Whether one kernel computes the gated output of many rows, so that the outputs of gate and up are not stored.
    pub(crate) fn is_one_kernel(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Stacked(layers) => layers.joined_halves().is_some_and(products::takes),
            #[cfg(not(feature = "cuda"))]
            Self::Stacked(_) => false,
            Self::Int8(_) => true,
        }
    }

    /// The gated output by a kernel that applies the gate, if there is one for these layers and rows.
    #[cfg(feature = "cuda")]
    fn in_one_kernel(layers: &StackedLinear, x: &Rows) -> Result<Option<Tensor>> {
        Ok(match (layers.joined_halves(), x) {
            (Some(weight), Rows::Plain(x)) => products::gated(x, weight)?,
            _ => None,
        })
    }

    #[cfg(not(feature = "cuda"))]
    fn in_one_kernel(_: &StackedLinear, _: &Rows) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Whether inputs may be quantised by the step that computes them.
    pub(crate) fn takes_int8(&self) -> bool {
        match self {
            Self::Stacked(layers) => layers.takes_int8(),
            Self::Int8(_) => true,
        }
    }

    /// These layers in the form that suits the number of rows of `x`.
    pub(crate) fn for_inputs_like(&self, x: &Rows) -> Result<Cow<'_, Self>> {
        Ok(match self {
            Self::Stacked(layers) => match layers.for_inputs_like(x)? {
                Cow::Owned(layers) => Cow::Owned(Self::Stacked(layers)),
                Cow::Borrowed(_) => Cow::Borrowed(self),
            },
            Self::Int8(_) => Cow::Borrowed(self),
        })
    }
}
