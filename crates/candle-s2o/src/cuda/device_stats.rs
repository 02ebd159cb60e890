//! The statistics of a call on the GPU: counts of visited tiles and sums of the probes.

use s2o_core::{AttnShape, AttnStats, Plan, ProbeStats, S2oConfig};
use s2o_cuda::{CudaError, Region, Regions, Scratch};
use s2o_kernels::params::PROBE_SUMS;
use s2o_kernels::{TILE_K, TILE_Q};

/// The counts and sums of a call, in memory of their own, which outlives the scratch memory of the call.
#[derive(Debug)]
pub(crate) struct DeviceStats {
    shape: AttnShape,
    config: S2oConfig,
    plan: Plan,
    counts: Counts,
    memory: Scratch,
}

/// The regions of a call's statistics. Units are the segments of all heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    /// For each query tile of each unit.
    pub(super) tiles_visited: Region<i32>,
    /// For each unit with probes.
    pub(super) sums: Region<[f64; PROBE_SUMS]>,
    /// For each unit with a bound on its error: tiles and number of the passes that were replaced.
    pub(super) repeated: Region<[i32; 2]>,
}

impl Counts {
    /// Adds the regions to a layout.
    pub(super) fn new(regions: &mut Regions, shape: &AttnShape, plan: &Plan, config: &S2oConfig) -> Self {
        let units = shape.batch() * shape.num_heads() * plan.segments.len();
        let probed = if plan.probe_stride.is_some() { units } else { 0 };
        Self {
            tiles_visited: regions.add(units * (plan.segment_len / TILE_Q)),
            sums: regions.add(probed),
            repeated: regions.add(if config.max_error().is_some() { probed } else { 0 }),
        }
    }

    /// Where the counts of tiles begin that belong to the heads after the first `heads`.
    pub(super) fn tiles_visited_of(self, memory: &Scratch, plan: &Plan, heads: usize) -> *mut i32 {
        memory.at(self.tiles_visited).wrapping_add(heads * plan.segments.len() * (plan.segment_len / TILE_Q))
    }
}

impl DeviceStats {
    pub(super) fn new(shape: AttnShape, config: S2oConfig, plan: Plan, counts: Counts, memory: Scratch) -> Self {
        Self { shape, config, plan, counts, memory }
    }

    /// Waits for the GPU and reads the counts and sums.
    pub(crate) fn read(&self) -> Result<AttnStats, CudaError> {
        let Self { shape, config, plan, counts, memory } = self;
        let tiles_visited = memory.download(counts.tiles_visited)?;
        let tiles_per_segment = plan.segment_len / TILE_Q;
        let visited = |head: usize, s: usize, tile: usize| {
            let segment = &plan.segments[s];
            if segment.start == 0 {
                return 0;
            }
            // The single pass also counts window tiles. Tiles are counted from the segment's start.
            let (tile, window_tiles) = if config.q_perm() {
                (tile, 0)
            } else {
                let tile = (shape.q_offset() + segment.rows.start - segment.start) / TILE_Q + tile;
                (tile, tile + 1)
            };
            let count = tiles_visited[(head * plan.segments.len() + s) * tiles_per_segment + tile] as usize;
            count - window_tiles
        };
        Ok(plan.stats(shape, config, visited, self.probes()?))
    }

    /// What the probes measured, for each head and each of its segments that has any.
    fn probes(&self) -> Result<Vec<Vec<ProbeStats>>, CudaError> {
        let Self { plan, counts, memory, .. } = self;
        let sums = memory.download(counts.sums)?;
        let repeated = memory.download(counts.repeated)?;
        let units = plan.segments.len();
        let of_unit = |unit: usize| {
            let [sums @ .., probes, keys] = sums[unit];
            let [tiles, repeats] = repeated.get(unit).copied().unwrap_or_default().map(|count| count as usize);
            let segment = &plan.segments[unit % units];
            let tiles = keys / (TILE_Q * TILE_K) as f64 + tiles as f64;
            let mut stats = ProbeStats::from_sums(segment.index, [segment.rows.len(), probes as usize], tiles, sums);
            stats.repeats = repeats;
            stats
        };
        let of_head = |head: usize| {
            let has_rows = |unit: &usize| !plan.segments[unit % units].rows.is_empty();
            (head * units..(head + 1) * units).filter(has_rows).map(of_unit).collect()
        };
        Ok((0..sums.len() / units).map(of_head).collect())
    }
}
