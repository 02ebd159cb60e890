//! Attention methods by name, with what experiments ask of them.
//!
//! [`ALL`] is the only table: a new method is its file in `s2o-baselines` and a row here.

mod options;
mod s2o;
mod sdpa;
mod spec;
mod table;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor};
use candle_s2o::{Attention, AttnShape, Dense, HeadWork, PrefillCall};
use s2o_baselines::{BlockSelector, BlockSparse};

pub use options::Options;
pub use s2o::head_work;
pub use sdpa::Sdpa;
pub use spec::MethodSpec;
pub use table::{ALL, DENSE, Knob, MethodRow, find};

/// An attention method that knows how much it computed, and what of its time went into the choice.
pub trait Method: Attention {
    /// Takes the work of the last prompt by layer, of each query head (`b * num_heads + h`). Methods that are always
    /// dense may know of none.
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>>;

    /// One call, its two phases timed apart. A GPU is waited for after each.
    ///
    /// # Errors
    /// As [`Attention::prefill`].
    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed>;
}

/// One call of a method.
#[derive(Debug, Clone)]
pub struct Timed {
    /// As [`Attention::prefill`].
    pub out: Tensor,
    /// Deciding what to compute: ranking, pooling, choice of blocks.
    pub selection: Duration,
    /// Computing it.
    pub attention: Duration,
    /// Of each query head (`b * num_heads + h`).
    pub work: Vec<HeadWork>,
}

impl Timed {
    /// Share of the causal tiles that were computed, over all heads.
    pub fn density(&self) -> f64 {
        density(&self.work)
    }
}

/// Share of the causal tiles that `heads` computed together.
pub fn density<'w>(heads: impl IntoIterator<Item = &'w HeadWork>) -> f64 {
    let sum = heads.into_iter().fold(HeadWork::default(), |sum, head| HeadWork {
        visited: sum.visited + head.visited,
        causal: sum.causal + head.causal,
    });
    sum.density()
}

/// Runs `step` and waits for the device.
fn time<T>(device: &Device, step: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let start = Instant::now();
    let result = step()?;
    device.synchronize()?;
    Ok((result, start.elapsed()))
}

impl Method for Dense {
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>> {
        BTreeMap::new()
    }

    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        timed_exact(self, call, q, k, v)
    }
}

/// [`Method::timed`] of a method that selects nothing.
///
/// # Errors
/// As [`Attention::prefill`].
pub fn timed_exact(attention: &dyn Attention, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
    let (out, attention) = time(q.device(), || attention.prefill(call, q, k, v))?;
    Ok(Timed { out, selection: Duration::ZERO, attention, work: HeadWork::dense(&shape_of(q, k, v)?) })
}

impl<S: BlockSelector> Method for BlockSparse<S> {
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>> {
        BlockSparse::take_work(self)
    }

    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        let (chosen, selection) = time(q.device(), || Ok(self.selector().select(call, q, k, v)?))?;
        let ((out, work), attention) = time(q.device(), || Ok(Self::attend(call, [q, k, v], chosen)?))?;
        Ok(Timed { out, selection, attention, work })
    }
}

fn shape_of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttnShape> {
    let dims = |tensor: &Tensor| tensor.dims4().map(|(b, s, h, d)| [b, s, h, d]);
    AttnShape::of(dims(q)?, dims(k)?, dims(v)?).map_err(candle_core::Error::wrap)
}
