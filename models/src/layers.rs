//! Linear layers, norms and the gated MLP from weights, with typed errors for missing tensors and wrong shapes.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder};

use crate::chunk;
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::fused::{self, GatedLinear, Linear, LinearPrecision, Rows};
use crate::matrix::{Matrix, read_part};
use crate::parallel::{Mode, Parallel, Shards};

/// Matrices that stay quantised, by Hugging Face name.
pub(crate) type Quantised = HashMap<String, Arc<QTensor>>;

/// The weights of a model, or those under a prefix.
#[derive(Clone)]
pub(crate) struct Weights<'v> {
    tensors: VarBuilder<'v>,
    quantised: &'v Quantised,
    linear: LinearPrecision,
    /// The files of `tensors`, if ranks read parts of them.
    files: Option<&'v MmapedSafetensors>,
}

impl<'v> Weights<'v> {
    pub(crate) fn new(tensors: VarBuilder<'v>, quantised: &'v Quantised, linear: LinearPrecision) -> Self {
        Self { tensors, quantised, linear, files: None }
    }

    /// Weights of which ranks read only their parts; `files` has all tensors.
    pub(crate) fn with_files(self, files: Option<&'v MmapedSafetensors>) -> Self {
        Self { files, ..self }
    }

    /// Whether [`Self::part`] may be called.
    pub(crate) fn has_files(&self) -> bool {
        self.files.is_some()
    }

    pub(crate) fn pp(&self, prefix: impl ToString) -> Self {
        Self { tensors: self.tensors.pp(prefix), ..self.clone() }
    }

    /// The precision that linear layers inside the decoder get after they are read.
    pub(crate) fn linear_precision(&self) -> LinearPrecision {
        self.linear
    }

    pub(crate) fn dtype(&self) -> DType {
        self.tensors.dtype()
    }

    pub(crate) fn device(&self) -> &Device {
        self.tensors.device()
    }

    pub(crate) fn tensor(&self, shape: &[usize], name: &str) -> Result<Tensor> {
        let error = |error| ModelError::from_tensor_read(&format!("{}.{name}", self.tensors.prefix()), error);
        self.tensors.get(shape, name).map_err(error)
    }

    /// The part `range` of dimension `dim` of a tensor of this shape. Only from files.
    pub(crate) fn part(&self, shape: &[usize], name: &str, dim: usize, range: Range<usize>) -> Result<Tensor> {
        let path = format!("{}.{name}", self.tensors.prefix());
        let files = self.files.ok_or_else(|| candle_core::Error::Msg(format!("{path}: expected weights in files")))?;
        read_part(files, &path, shape, dim, range, self.dtype(), self.device())
            .map_err(|error| ModelError::from_tensor_read(&path, error))
    }

    /// The linear layer under a name, to be read later.
    pub(crate) fn matrix(&self, name: &str, size_in: usize, size_out: usize, bias: bool) -> Matrix<'v> {
        Matrix::new(self.pp(name), size_in, size_out, bias)
    }

    /// The matrix `weight` `(size_out, size_in)`, and a bias if there is one.
    pub(crate) fn linear(&self, size_in: usize, size_out: usize, bias: bool) -> Result<Linear> {
        let bias = if bias { Some(self.tensor(&[size_out], "bias")?) } else { None };
        if let Some(blocks) = self.quantised.get(&format!("{}.weight", self.tensors.prefix())) {
            return Ok(Linear::Quantised(blocks.clone(), bias));
        }
        let weight = self.tensor(&[size_out, size_in], "weight")?;
        Ok(Linear::Dense(candle_nn::Linear::new(weight, bias)))
    }

    /// Whether some matrices stay quantised.
    pub(crate) fn are_quantised(&self) -> bool {
        !self.quantised.is_empty()
    }

    /// The dtype, and the types of the matrices that stay quantised: `bf16`, or `bf16 with Q4K and Q6K weights`.
    pub(crate) fn precision(&self) -> String {
        let types: BTreeSet<String> = self.quantised.values().map(|blocks| format!("{:?}", blocks.dtype())).collect();
        match types.is_empty() {
            true if self.linear == LinearPrecision::Int8 => {
                format!("{} with int8 linear layers", self.dtype().as_str())
            }
            true => self.dtype().as_str().to_owned(),
            false => format!("{} with {} weights", self.dtype().as_str(), Vec::from_iter(types).join(" and ")),
        }
    }

    /// Bytes of the weights of a model: of those that stay quantised, and of the others in the dtype.
    pub(crate) fn bytes(&self, config: &DecoderConfig) -> u64 {
        let quantised = self.quantised.values();
        let (elements, bytes) = quantised.fold((0, 0), |(elements, bytes), blocks| {
            (elements + blocks.shape().elem_count(), bytes + blocks.storage_size_in_bytes())
        });
        let narrowed = match self.linear {
            LinearPrecision::AsRead => 0,
            LinearPrecision::Int8 => config.linear_parameters() * (self.dtype().size_in_bytes() - 1),
        };
        ((config.num_parameters() - elements) * self.dtype().size_in_bytes() + bytes - narrowed) as u64
    }
}

/// The embedding `(vocab_size, hidden_size)`. If it is quantised, its rows are dequantised as they are read.
#[derive(Debug)]
pub(crate) struct Embedding {
    rows: Linear,
    width: usize,
}

impl Embedding {
    pub(crate) fn load(config: &DecoderConfig, weights: &Weights) -> Result<Self> {
        let width = config.hidden_size;
        Ok(Self { rows: weights.linear(width, config.vocab_size, false)?, width })
    }

    /// Embeddings of `tokens` `(batch, len)`: `(batch, len, hidden_size)` in `dtype`.
    pub(crate) fn forward(&self, tokens: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(match &self.rows {
            Linear::Dense(linear) => candle_nn::Embedding::new(linear.weight().clone(), self.width).forward(tokens)?,
            Linear::Quantised(blocks, _) => blocks.embedding(tokens)?.to_dtype(dtype)?,
            Linear::Int8(_) => {
                return Err(candle_core::Error::Msg("expected no int8 embedding".to_owned()).bt().into());
            }
        })
    }

    /// An output head with the same weight.
    pub(crate) fn tied_head(&self) -> Linear {
        self.rows.clone()
    }
}

/// RMS norm over the width of the residual stream.
#[derive(Debug)]
pub(crate) struct Norm {
    weight: Tensor,
    eps: f64,
}

impl Norm {
    pub(crate) fn load(size: usize, eps: f64, weights: &Weights) -> Result<Self> {
        Ok(Self { weight: weights.tensor(&[size], "weight")?, eps })
    }

    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// As [`Self::forward`], with the norm as inputs of linear layers: quantised if `as_int8`.
    pub(crate) fn forward_rows(&self, Residual { sum, delta }: Residual, as_int8: bool) -> Result<(Tensor, Rows)> {
        if as_int8 {
            let (sum, normed) = fused::rms_norm_int8(sum, delta.as_ref(), &self.weight, self.eps)?;
            return Ok((sum, Rows::Int8(normed)));
        }
        let (sum, normed) = self.forward(Residual { sum, delta })?;
        Ok((sum, normed.into()))
    }

    /// The residual stream, and its norm.
    pub(crate) fn forward(&self, Residual { sum, delta }: Residual) -> Result<(Tensor, Tensor)> {
        match delta {
            Some(delta) => Ok(fused::add_rms_norm(sum, &delta, &self.weight, self.eps)?),
            None => {
                let normed = fused::rms_norm(&sum, &self.weight, self.eps)?;
                Ok((sum, normed))
            }
        }
    }
}

/// The residual stream `(batch, len, hidden)` after a step, whose output may still be to be added: the next norm does this
/// in the same pass.
#[derive(Debug)]
pub(crate) struct Residual {
    pub(crate) sum: Tensor,
    pub(crate) delta: Option<Tensor>,
}

impl Residual {
    pub(crate) fn new(sum: Tensor, delta: Tensor) -> Self {
        Self { sum, delta: Some(delta) }
    }

    /// The residual stream `sum` `(batch, len, hidden)` with the output of `linear` for `x` `(batch, len, size_in)`, which may
    /// be added in the memory of `sum`.
    pub(crate) fn after(sum: Tensor, linear: &Linear, x: &Tensor) -> Result<Self> {
        let Some(linear) = linear.adding(&sum) else {
            return Ok(Self::new(sum, linear.forward(x)?));
        };
        linear.add_to(&x.clone().into(), &sum)?;
        Ok(sum.into())
    }
}

impl From<Tensor> for Residual {
    fn from(sum: Tensor) -> Self {
        Self { sum, delta: None }
    }
}

/// A step of a layer whose work the ranks share: this rank's part of it, for all tokens, and in sequence parallelism the
/// whole, for this rank's tokens. On one device both are the same.
#[derive(Debug)]
pub(crate) struct Shared<T> {
    own: T,
    whole: Option<T>,
    parallel: Option<Parallel>,
}

impl<T> Shared<T> {
    pub(crate) fn new(
        parallel: Option<&Parallel>,
        whole: impl FnOnce() -> Result<T>,
        part: impl FnOnce(&Parallel) -> Result<T>,
    ) -> Result<Self> {
        let (own, whole) = match parallel {
            None => (whole()?, None),
            Some(parallel) if parallel.mode() == Mode::Sequence => {
                // First, so that the part is not read again.
                let whole = whole()?;
                (part(parallel)?, Some(whole))
            }
            Some(parallel) => (part(parallel)?, None),
        };
        Ok(Self { own, whole, parallel: parallel.cloned() })
    }

    /// The output for all tokens: the sum of what `run` returns on all ranks.
    pub(crate) fn of_part(&self, run: impl FnOnce(&T) -> Result<Tensor>) -> Result<Tensor> {
        let out = run(&self.own)?;
        match &self.parallel {
            None => Ok(out),
            Some(parallel) => parallel.sum(out),
        }
    }

    /// The step with complete outputs, if this rank has it: for the tokens of `shards`, or if the ranks do not share it.
    pub(crate) fn complete(&self, shards: Option<Shards>) -> Option<&T> {
        (shards.is_some() || self.parallel.is_none()).then(|| self.whole())
    }

    /// The whole step, for shards of the tokens.
    pub(crate) fn whole(&self) -> &T {
        self.whole.as_ref().unwrap_or(&self.own)
    }
}

/// Elements of one intermediate tensor on a CPU (three such tensors exist at once).
const ELEMENTS_ON_CPU: usize = 1 << 24;
/// Rows per slice on other devices, if the outputs of gate and up are stored: large matrix products need thousands.
const ROWS_ON_GPU: usize = 16384;

/// The gated MLP of one layer.
#[derive(Debug)]
pub(crate) struct Mlp {
    gate_up: GatedLinear,
    down: Linear,
    rows_at_a_time: usize,
}

impl Mlp {
    pub(crate) fn load(config: &DecoderConfig, weights: &Weights, parallel: Option<&Parallel>) -> Result<Shared<Self>> {
        let (hidden, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let projection = |name: &str| weights.matrix(name, hidden, inner, bias);
        let (gate, up) = (projection("gate_proj"), projection("up_proj"));
        let down = weights.matrix("down_proj", inner, hidden, bias);
        let is_on_cpu = weights.device().is_cpu();
        let precision = weights.linear_precision();
        let new = |gate, up, down: Linear| {
            let gate_up = GatedLinear::new(gate, up, precision)?;
            let rows_at_a_time = match is_on_cpu {
                true => (ELEMENTS_ON_CPU / inner).max(64),
                false if gate_up.is_one_kernel() => chunk::MOST,
                false => ROWS_ON_GPU,
            };
            Ok(Self { gate_up, down: down.in_precision(precision)?, rows_at_a_time })
        };
        let part = |parallel: &Parallel| {
            let own = parallel.own(inner);
            new(gate.outputs(own.clone())?, up.outputs(own.clone())?, down.inputs(own)?)
        };
        Shared::new(parallel, || new(gate.whole()?, up.whole()?, down.whole()?), part)
    }

    /// Whether inputs may be quantised by the step that computes them.
    pub(crate) fn takes_int8(&self) -> bool {
        self.gate_up.takes_int8()
    }

    /// The output `(batch, len, hidden)` for inputs of this shape, not empty.
    pub(crate) fn forward(&self, x: Rows) -> Result<Tensor> {
        let shape = x.dims().to_vec();
        let down = self.down.for_inputs_like(&x)?;
        let mut outputs = Vec::new();
        self.gated(&x, |_, gated| {
            outputs.push(down.forward(&gated)?);
            Ok(())
        })?;
        let out = if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(&outputs, 0)? };
        Ok(out.reshape(shape)?)
    }

    /// The residual stream `sum` `(batch, len, hidden)` with the output for its norm `x`, which may be added in the memory of
    /// `sum`.
    pub(crate) fn after(&self, sum: Tensor, x: Rows) -> Result<Residual> {
        let Some(down) = self.down.adding(&sum) else {
            return Ok(Residual::new(sum, self.forward(x)?));
        };
        let rows = sum.flatten_to(sum.rank() - 2)?;
        self.gated(&x, |start, gated| {
            let len = gated.dim(0)?;
            Ok(down.add_to(&gated.into(), &rows.narrow(0, start, len)?)?)
        })?;
        Ok(sum.into())
    }

    /// Calls `take` with the first row and the gated outputs `(rows, inner)` of each slice of rows. A whole prompt's gated
    /// outputs are several times the residual stream.
    fn gated(&self, x: &Rows, mut take: impl FnMut(usize, Tensor) -> Result<()>) -> Result<()> {
        let x = x.flat()?;
        let rows = x.dims()[0];
        // Quantised weights are dequantised once for all slices.
        let gate_up = self.gate_up.for_inputs_like(&x)?;
        for start in (0..rows).step_by(self.rows_at_a_time) {
            take(start, gate_up.forward(&x.narrow(start, self.rows_at_a_time.min(rows - start))?)?)?;
        }
        Ok(())
    }
}
