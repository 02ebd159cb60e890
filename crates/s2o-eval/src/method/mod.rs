//! Attention methods by name, with the measurements that experiments need.
//!
//! [`ALL`] is the only table. A new method is a file in `s2o-baselines` and a row in this table.

mod sdpa;
mod spec;
mod table;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::{Device, Error, Result, Tensor};
use candle_s2o::{Attention, AttnShape, AttnStats, Dense, HeadStats, HeadWork, PrefillCall, ProbeStats, S2o};
use s2o_baselines::{BlockSelector, BlockSparse};

pub use sdpa::Sdpa;
pub use spec::MethodSpec;
pub use table::{ALL, DENSE, Knob, MethodRow, find};

/// An attention method that reports its computed tiles and its time for selection. The defaults are those of
/// exact attention.
pub trait Method: Attention {
    /// Takes the work of the last prompt by layer, for each query head (`b * num_heads + h`). A method that is always
    /// dense may return an empty map.
    ///
    /// # Errors
    /// If a GPU failed.
    fn take_work(&self) -> Result<BTreeMap<usize, Vec<HeadWork>>> {
        Ok(BTreeMap::new())
    }

    /// One call with its two phases timed separately. Waits for a GPU after each phase.
    ///
    /// # Errors
    /// As [`Attention::prefill`].
    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        let (out, attention) = time(q.device(), || self.prefill(call, q, k, v))?;
        Ok(Timed { out, selection: Duration::ZERO, attention, work: HeadWork::dense(&shape_of(q, k, v)?) })
    }
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
    total(heads).density()
}

/// The work of several heads together.
pub fn total<'w>(heads: impl IntoIterator<Item = &'w HeadWork>) -> HeadWork {
    heads.into_iter().fold(HeadWork::default(), |sum, head| HeadWork {
        visited: sum.visited + head.visited,
        causal: sum.causal + head.causal,
        probes: sum.probes.into_iter().chain(head.probes).reduce(ProbeStats::plus),
    })
}

/// Runs `step` and waits for the device.
fn time<T>(device: &Device, step: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let start = Instant::now();
    let result = step()?;
    device.synchronize()?;
    Ok((result, start.elapsed()))
}

impl Method for Dense {}

impl Method for S2o {
    fn take_work(&self) -> Result<BTreeMap<usize, Vec<HeadWork>>> {
        Ok(self.take_stats()?.into_iter().map(|(layer, stats)| (layer, head_work(&stats))).collect())
    }

    /// On the CPU all orders are made before attention, so that they can be timed; a plain call makes them group by
    /// group. On a GPU these are the times of the kernels.
    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        let op = self.op(call).map_err(Error::wrap)?;
        #[cfg(feature = "cuda")]
        if q.device().is_cuda() {
            let (_, stats) = op.clone().apply_with_stats(q, k, v)?;
            let (out, kernels) = op.apply_timed(q, k, v)?;
            let total = |ranks| {
                let ms: f64 = kernels.iter().filter(|kernel| kernel.ranks() == ranks).map(|kernel| kernel.ms).sum();
                Duration::from_secs_f64(ms / 1e3)
            };
            return Ok(Timed { out, selection: total(true), attention: total(false), work: head_work(&stats) });
        }
        let (ranking, selection) = time(q.device(), || Ok(op.clone().rank(q, k)?))?;
        let op = op.with_ranking(ranking);
        let ((out, stats), attention) = time(q.device(), || Ok(op.apply_with_stats(q, k, v)?))?;
        Ok(Timed { out, selection, attention, work: head_work(&stats) })
    }
}

pub(crate) fn head_work(stats: &AttnStats) -> Vec<HeadWork> {
    let work = |head: &HeadStats| HeadWork {
        visited: head.tiles_computed(),
        causal: head.tiles_causal(),
        probes: head.probes.iter().copied().reduce(ProbeStats::plus),
    };
    stats.heads.iter().map(work).collect()
}

impl<S: BlockSelector> Method for BlockSparse<S> {
    fn take_work(&self) -> Result<BTreeMap<usize, Vec<HeadWork>>> {
        Ok(BlockSparse::take_work(self))
    }

    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        let (chosen, selection) = time(q.device(), || Ok(self.selector().select(call, q, k, v)?))?;
        let ((out, work), attention) = time(q.device(), || Ok(self.attend_and_correct(call, [q, k, v], chosen)?))?;
        Ok(Timed { out, selection, attention, work })
    }
}

pub(crate) fn shape_of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttnShape> {
    let dims = |tensor: &Tensor| tensor.dims4().map(|(b, s, h, d)| [b, s, h, d]);
    AttnShape::of(dims(q)?, dims(k)?, dims(v)?).map_err(Error::wrap)
}
