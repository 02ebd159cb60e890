//! S2O as a [`Method`].

use std::collections::BTreeMap;
#[cfg(feature = "cuda")]
use std::time::Duration;

use candle_core::{Result, Tensor};
use candle_s2o::{AttnStats, HeadWork, PrefillCall, S2o, S2oOp};

use super::{Method, Timed, time};

/// Work by head from the statistics.
pub fn head_work(stats: &AttnStats) -> Vec<HeadWork> {
    let head =
        |head: &candle_s2o::HeadStats| HeadWork { visited: head.tiles_visited() as f64, causal: head.tiles_causal() };
    stats.heads.iter().map(head).collect()
}

impl Method for S2o {
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>> {
        self.take_stats().into_iter().map(|(layer, stats)| (layer, head_work(&stats))).collect()
    }

    /// On the CPU all orders are made before attention, so that they can be timed; a plain call makes them group by
    /// group. On a GPU these are the times of the kernels.
    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        self.check_layer(call.layer).map_err(candle_core::Error::wrap)?;
        let op = S2oOp::new(call.softmax_scale, self.config_of(call.layer).clone()).with_prompt_len(call.prompt_len);
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
