//! Attention methods by name, with the measurements that experiments need.
//!
//! [`ALL`] is the only table. A new method is a file in `s2o-baselines` and a row in this table.

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

/// An attention method that reports its computed tiles and its time for selection.
pub trait Method: Attention {
    /// Takes the work of the last prompt by layer, for each query head (`b * num_heads + h`). A method that is always
    /// dense may return an empty map.
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>>;

    /// One call with its two phases timed separately. Waits for a GPU after each phase.
    ///
    /// # Errors
    /// As [`Attention::prefill`].
    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed>;
}

/// One call of a method.
#[derive(Debug, Clone)]
pub struct Timed {
    /// The output of [`Attention::prefill`].
    pub out: Tensor,
    /// Time for selection: ranking, pooling, choice of blocks.
    pub selection: Duration,
    /// Time for attention.
    pub attention: Duration,
    /// Work of each query head (`b * num_heads + h`).
    pub work: Vec<HeadWork>,
}

impl Timed {
    /// Share of the causal tiles that were computed, over all heads.
    pub fn density(&self) -> f64 {
        density(&self.work)
    }
}

/// Joint share of the causal tiles that `heads` computed.
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

/// [`Method::timed`] for a method that selects nothing.
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
