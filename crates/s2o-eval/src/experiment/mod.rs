//! The operator-level experiments of the S2O paper, for any method, on the queries, keys and values of any layer.
//!
//! | | | |
//! |---|---|---|
//! | [`matched_density`] | Fig. 5a | error of all methods at the same density |
//! | [`time_split`] | Fig. 5b, 1 | time for selecting and for attending, with density and error |
//! | [`matched_speed`] | Fig. 6 | S2O against random blocks of the same density |
//! | [`tau_and_segment`] | Table 2 | threshold and segment length |
//! | [`components`] | Table 3 | local window, ranked keys, ranked queries |
//! | [`heads`] | | density by layer and head |
//!
//! Every experiment takes one layer at a time and returns plain rows, so that only one layer's tensors are in memory.
//! Errors are relative to [`Exact`]. Averages over heads give all elements of the output the same weight.

pub mod components;
pub mod heads;
pub mod matched_density;
pub mod matched_speed;
pub mod tau_and_segment;
pub mod time_split;

use std::num::NonZeroUsize;

use candle_core::{DType, Tensor};
use candle_s2o::{Dense, Mask, PrefillCall, dense_attn};

use crate::capture::LayerTensors;
use crate::error::Result;
use crate::method::{Method, Sdpa, Timed};
use crate::metrics::{ErrorSums, Errors, median};

/// A layer with the f32 output of exact attention: from our dense attention on the CPU, from Candle's own ops on a GPU,
/// because our GPU kernels compute in 16 bits.
#[derive(Debug)]
pub struct Exact<'t> {
    tensors: &'t LayerTensors,
    call: PrefillCall,
    out: Tensor,
}

/// One method on one layer.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Share of the causal tiles that were computed, over all heads.
    pub density: f64,
    /// Errors over all heads.
    pub errors: Errors,
    /// Results by query head, over all sequences of the batch.
    pub heads: Vec<HeadMeasured>,
    /// Seconds for selection.
    pub selection_seconds: f64,
    /// Seconds for attention.
    pub attention_seconds: f64,
}

/// One query head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadMeasured {
    /// Share of the head's causal tiles that were computed.
    pub density: f64,
    /// Errors of the head's output.
    pub errors: Errors,
}

impl Measured {
    /// Sum of both times, in seconds.
    pub fn seconds(&self) -> f64 {
        self.selection_seconds + self.attention_seconds
    }
}

impl<'t> Exact<'t> {
    /// Computes the exact output.
    ///
    /// # Errors
    /// If the shapes of the tensors do not match.
    pub fn new(tensors: &'t LayerTensors) -> Result<Self> {
        let call = tensors.call()?;
        tensors.shape()?;
        let LayerTensors { q, k, v, softmax_scale, .. } = tensors;
        let out = if q.device().is_cpu() {
            let f32 = |tensor: &Tensor| tensor.to_dtype(DType::F32);
            dense_attn(&f32(q)?, &f32(k)?, &f32(v)?, *softmax_scale, Mask::Causal).map_err(candle_core::Error::from)?
        } else {
            Sdpa::in_f32(&call, q, k, v)?
        };
        Ok(Self { tensors, call, out })
    }

    /// Index of the layer.
    pub fn layer(&self) -> usize {
        self.call.layer
    }

    /// Keys.
    pub fn tokens(&self) -> usize {
        self.call.prompt_len
    }

    /// Runs a method once and times its phases separately.
    ///
    /// # Errors
    /// If the method refuses the tensors.
    pub fn run(&self, method: &dyn Method) -> Result<Timed> {
        Ok(method.timed(&self.call, &self.tensors.q, &self.tensors.k, &self.tensors.v)?)
    }

    /// Runs a method and compares its output.
    ///
    /// # Errors
    /// If the method refuses the tensors.
    pub fn measure(&self, method: &dyn Method) -> Result<Measured> {
        if !self.tensors.q.device().is_cpu() {
            // The first call on a GPU loads its kernels.
            drop(self.run(method)?);
        }
        self.compare(&self.run(method)?)
    }

    /// Measures each method `repeats` times, alternating with the others and with our dense attention, so that changes
    /// of the machine affect all alike. Errors and density are those of the first run, seconds are medians. The first
    /// value is the time of dense attention.
    ///
    /// # Errors
    /// If a method refuses the tensors.
    pub fn measure_in_turns(&self, methods: &[Box<dyn Method>], repeats: NonZeroUsize) -> Result<(f64, Vec<Measured>)> {
        let methods: Vec<&dyn Method> =
            [&Dense as &dyn Method].into_iter().chain(methods.iter().map(AsRef::as_ref)).collect();
        let mut all = methods.iter().map(|method| self.measure(*method)).collect::<Result<Vec<_>>>()?;
        let mut times: Vec<[Vec<f64>; 2]> =
            all.iter().map(|first| [vec![first.selection_seconds], vec![first.attention_seconds]]).collect();
        for _ in 1..repeats.get() {
            for (method, [selection, attention]) in methods.iter().zip(&mut times) {
                let timed = self.run(*method)?;
                selection.push(timed.selection.as_secs_f64());
                attention.push(timed.attention.as_secs_f64());
            }
        }
        for (measured, [selection, attention]) in all.iter_mut().zip(times) {
            (measured.selection_seconds, measured.attention_seconds) = (median(selection), median(attention));
        }
        Ok((all.remove(0).seconds(), all))
    }

    fn compare(&self, timed: &Timed) -> Result<Measured> {
        let sums = ErrorSums::by_head(&self.out, &timed.out)?;
        let num_heads = sums.len();
        let heads = sums.iter().enumerate().map(|(head, sums)| HeadMeasured {
            density: crate::method::density(timed.work.iter().skip(head).step_by(num_heads)),
            errors: sums.errors(),
        });
        Ok(Measured {
            density: timed.density(),
            heads: heads.collect(),
            errors: sums.iter().copied().sum::<ErrorSums>().errors(),
            selection_seconds: timed.selection.as_secs_f64(),
            attention_seconds: timed.attention.as_secs_f64(),
        })
    }
}

/// A layer of two query heads and one KV head, where one key in thirteen has most of the mass.
#[cfg(test)]
pub(crate) fn random_layer(layer: usize, len: usize) -> LayerTensors {
    use candle_core::Device;

    const HEAD_DIM: usize = 32;
    let mut state = layer as u64 + 1;
    let mut random = |heads: usize, mean: fn(usize) -> f32| {
        let numbers = (0..len * heads * HEAD_DIM).map(|i| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            mean(i / (heads * HEAD_DIM)) + 2.0 * ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5)
        });
        Tensor::from_vec(numbers.collect::<Vec<_>>(), (1, len, heads, HEAD_DIM), &Device::Cpu).unwrap()
    };
    let q = random(2, |_| 1.0);
    let k = random(1, |position| if position % 13 == 5 { 1.0 } else { 0.0 });
    let v = random(1, |_| 0.0);
    LayerTensors { layer, q, k, v, softmax_scale: 0.15 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_is_exact() {
        let layer = random_layer(3, 600);
        let exact = Exact::new(&layer).unwrap();
        assert_eq!((exact.layer(), exact.tokens()), (3, 600));
        let methods: [Box<dyn Method>; 2] = [Box::new(Dense), Box::new(Sdpa)];
        let (dense_seconds, all) = exact.measure_in_turns(&methods, NonZeroUsize::new(2).unwrap()).unwrap();
        assert_eq!((all[0].errors.mse, all[0].density, all[0].selection_seconds), (0.0, 1.0, 0.0));
        assert!(all[1].errors.mse > 0.0 && all[1].errors.rel_l1 < 1e-5, "{:?}", all[1]);
        assert!(dense_seconds > 0.0);
        assert!(all.iter().all(|measured| measured.heads.len() == 2 && measured.seconds() > 0.0));
    }
}
