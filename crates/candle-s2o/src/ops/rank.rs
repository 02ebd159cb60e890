//! Algorithm 1 alone: the orders of keys and queries, without attention.

use candle_core::Tensor;
use s2o_core::Ranking;

use super::s2o::S2oOp;
use crate::attn_op::{AttnOp, report};
use crate::error::AttnError;

impl S2oOp {
    /// Runs only Algorithm 1 on the device of the tensors: returns the orders of every head (`b * num_heads + h`) and
    /// segment. On a GPU the host waits for the orders.
    ///
    /// # Errors
    /// The same as [`S2oOp::apply`].
    pub fn rank(self, q: &Tensor, k: &Tensor) -> Result<Ranking, AttnError> {
        // The ranking does not read the values.
        let softmax_scale = self.softmax_scale;
        report(&RankOp(self), softmax_scale, [q, k, k])
    }
}

/// The ranking of an [`S2oOp`].
#[derive(Debug)]
pub(crate) struct RankOp(pub(crate) S2oOp);

impl AttnOp for RankOp {
    const NAME: &'static str = "s2o-ranking";
    const HAS_OUTPUT: bool = false;
    type Report = Ranking;
}
