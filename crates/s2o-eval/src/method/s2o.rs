//! S2O as a [`Method`].

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};
use candle_s2o::{AttnStats, HeadWork, PrefillCall, S2o, S2oOp};

use super::{Method, Timed, time};

/// The work that statistics tell of, by head.
pub fn head_work(stats: &AttnStats) -> Vec<HeadWork> {
    let head =
        |head: &candle_s2o::HeadStats| HeadWork { visited: head.tiles_visited() as f64, causal: head.tiles_causal() };
    stats.heads.iter().map(head).collect()
}

impl Method for S2o {
    fn take_work(&self) -> BTreeMap<usize, Vec<HeadWork>> {
        self.take_stats().into_iter().map(|(layer, stats)| (layer, head_work(&stats))).collect()
    }

    /// The orders are made apart here, so that they can be timed; a plain call makes them group by group.
    fn timed(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Timed> {
        self.check_layer(call.layer).map_err(candle_core::Error::wrap)?;
        let op = S2oOp::new(call.softmax_scale, self.config_of(call.layer).clone()).with_prompt_len(call.prompt_len);
        let (ranking, selection) = time(q.device(), || Ok(op.clone().rank(q, k)?))?;
        let op = op.with_ranking(ranking);
        let ((out, stats), attention) = time(q.device(), || Ok(op.apply_with_stats(q, k, v)?))?;
        Ok(Timed { out, selection, attention, work: head_work(&stats) })
    }
}
