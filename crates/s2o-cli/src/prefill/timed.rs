//! [`Timed`]: time of each layer's attention, for any method.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use candle_core::{Result, Tensor};
use candle_s2o::{Attention, PrefillCall};

use crate::progress::Progress;

/// An attention method with a timer. It also reports progress in tokens after each layer, because a chunk of a large
/// model takes too long for one report per chunk.
#[derive(Debug)]
pub struct Timed<'a> {
    inner: &'a dyn Attention,
    progress: &'a Progress,
    layers: Mutex<Vec<Duration>>,
}

impl<'a> Timed<'a> {
    /// Times `inner` in a model of `num_layers` layers.
    pub fn new(inner: &'a dyn Attention, num_layers: usize, progress: &'a Progress) -> Self {
        Self { inner, progress, layers: Mutex::new(vec![Duration::ZERO; num_layers]) }
    }

    /// Time spent in each layer, over all chunks.
    pub fn into_layers(self) -> Vec<Duration> {
        self.layers.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attention for Timed<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        // Devices work asynchronously: without waiting, the projections would be timed too.
        q.device().synchronize()?;
        let start = Instant::now();
        let out = self.inner.prefill(call, q, k, v)?;
        out.device().synchronize()?;
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        layers[call.layer] += start.elapsed();
        let (chunk, end) = (q.dim(1)?, k.dim(1)?);
        self.progress.set(end - chunk + chunk * (call.layer + 1) / layers.len());
        Ok(out)
    }
}
