//! [`PendingStats`]: the statistics of a call that a GPU may not have finished.

use s2o_core::AttnStats;

use crate::error::AttnError;

/// The statistics of a call, see [`S2oOp::apply_with_pending_stats`](crate::S2oOp::apply_with_pending_stats). Those of
/// a GPU stay in its memory until they are read: 4 bytes for each query tile and head, and, with probes, up to 80 for
/// each segment and head.
#[derive(Debug)]
pub struct PendingStats(Source);

#[derive(Debug)]
enum Source {
    Known(AttnStats),
    #[cfg(feature = "cuda")]
    OnGpu(Box<crate::cuda::DeviceStats>),
}

impl PendingStats {
    /// Returns the statistics. Waits for the call if it ran on a GPU.
    ///
    /// # Errors
    /// If the GPU failed, or its stream captures a graph.
    pub fn read(self) -> Result<AttnStats, AttnError> {
        match self.0 {
            Source::Known(stats) => Ok(stats),
            #[cfg(feature = "cuda")]
            Source::OnGpu(stats) => Ok(stats.read()?),
        }
    }
}

impl From<AttnStats> for PendingStats {
    fn from(stats: AttnStats) -> Self {
        Self(Source::Known(stats))
    }
}

#[cfg(feature = "cuda")]
impl From<crate::cuda::DeviceStats> for PendingStats {
    fn from(stats: crate::cuda::DeviceStats) -> Self {
        Self(Source::OnGpu(Box::new(stats)))
    }
}
