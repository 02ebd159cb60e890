//! Algorithm 1 on the GPU: the orders of a group of segments, for every head at once.

use std::ptr;

use s2o_core::{KeyScore, Plan, S2oConfig, StopRule};
use s2o_cuda::{CudaError, Grid, Region, Regions, Scratch, to_i32};
use s2o_kernels::Kernel;
use s2o_kernels::params::RankingParams;
use s2o_kernels::ranking::{
    SCORE_BLOCK, SORTED_KEYS, ScoreShape, SortShape, moment_splits, query_order_shared_bytes, score_blocks,
};

use super::call::Call;
use super::segment_group::SegmentGroup;

/// Longest prompt whose keys are all sorted. An order of three eighths cost answers of `cwe` at 64K tokens, and none at 128K.
const COMPLETELY_SORTED: usize = 98_304;

/// Keys before a segment that are sorted, to the end of a bucket. Rules that average or sum over rows get all.
fn sorted_keys(config: &S2oConfig, plan: &Plan) -> i32 {
    match config.stop_rule() {
        StopRule::MeanRatio | StopRule::SumRatio => i32::MAX,
        _ if plan.prompt_len <= COMPLETELY_SORTED => i32::MAX,
        _ => SORTED_KEYS,
    }
}

/// More blocks would only repeat the count of the row.
const MOST_BLOCKS_OF_ROW: usize = 8;

/// Scratch memory of the ranking, large enough for each group.
pub(super) struct Ranker {
    coefficients: Region<u16>,
    partial_moments: Region<f32>,
    scores: Region<u16>,
    /// The scores if one block sorts a row.
    buckets: Region<u16>,
    score_ranges: Region<f32>,
    key_guide: Region<f32>,
    /// With probes.
    prefix_factors: Region<f32>,
    /// The caller has the orders.
    is_given: bool,
}

/// Destination of the results, and counters that are zero.
#[derive(Clone, Copy)]
pub(super) struct Orders {
    pub(super) kv_perm: *mut i32,
    /// With query permutation.
    pub(super) q_perm: Option<*mut i32>,
    /// With probes: an estimate of the mean weight of the keys before the segment, for each row.
    pub(super) prefix_score: Option<*mut f32>,
    /// For each head and segment of a group.
    pub(super) arrivals: *mut u32,
    /// Counters from `arrivals` on that the first kernel sets to zero, if [`Ranker::zeroes`] says that it can.
    pub(super) zeroed: usize,
}

impl Ranker {
    /// If the orders are given, it computes only the estimates for probes.
    pub(super) fn new(
        regions: &mut Regions,
        call: &Call,
        plan: &Plan,
        groups: &[SegmentGroup],
        is_given: bool,
    ) -> Result<Self, CudaError> {
        let shape = &call.shape;
        let heads = shape.batch() * shape.num_heads();
        let max = |count: fn(&SegmentGroup) -> usize| heads * groups.iter().map(count).max().unwrap_or(0);
        let (segments, keys) = (max(SegmentGroup::len), if is_given { 0 } else { max(|group| group.keys) });
        let factors =
            if plan.probe_stride.is_some() { segments / shape.group_size() * 2 * shape.head_dim() } else { 0 };
        let mut is_shared = false;
        for group in groups {
            is_shared |= Self::sort_of(call, plan, group)?.1 > 1;
        }
        let partials = groups.iter().map(|group| {
            let splits = moment_splits(plan.segment_len);
            if splits == 1 { 0 } else { heads * (group.len()) * splits * (2 * shape.head_dim() + 1) }
        });
        let scores = regions.add(keys);
        Ok(Self {
            coefficients: regions.add(segments * 2 * shape.head_dim()),
            partial_moments: regions.add(partials.max().unwrap_or(0)),
            scores,
            buckets: if is_shared { regions.add(keys) } else { scores },
            score_ranges: regions.add(keys / SCORE_BLOCK * 2),
            key_guide: regions.add(shape.batch() * shape.num_kv_heads() * shape.head_dim()),
            prefix_factors: regions.add(factors),
            is_given,
        })
    }

    /// The shape of the sort of a group, and the blocks that sort a row: as many as keep the GPU busy if rows are few.
    fn sort_of(call: &Call, plan: &Plan, group: &SegmentGroup) -> Result<(SortShape, usize), CudaError> {
        let limit = call.launcher.shared_limit(call.function(Kernel::Sort))?;
        let shape = SortShape::fitting(limit, plan.segments[group.end - 1].start, plan.prompt_len);
        let rows = call.shape.batch() * call.shape.num_heads() * group.len();
        let fitting = call.launcher.multiprocessors() * shape.per_multiprocessor;
        Ok((shape, (fitting / rows).clamp(1, MOST_BLOCKS_OF_ROW)))
    }

    /// Whether the first kernel can set counters to zero: that of the probes, or one that counts nothing itself.
    pub(super) fn zeroes(plan: &Plan, has_probes: bool) -> bool {
        has_probes || moment_splits(plan.segment_len) == 1
    }

    /// Enqueues the ranking of a group.
    pub(super) fn rank(
        &self,
        call: &Call,
        scratch: &Scratch,
        config: &S2oConfig,
        plan: &Plan,
        group: &SegmentGroup,
        orders: Orders,
    ) -> Result<(), CudaError> {
        let shape = &call.shape;
        let segments = group.len();
        let (sort, blocks_of_row) = Self::sort_of(call, plan, group)?;
        let longest = plan.segments[group.end - 1].start;
        let coefficient_head_stride = (segments * 2 * shape.head_dim()) as i64;
        let params = RankingParams {
            q: call.q.address as *const _,
            k: call.k.address as *const _,
            kv_perm: orders.kv_perm,
            coefficients: scratch.at(self.coefficients),
            partial_moments: scratch.at(self.partial_moments),
            arrivals: orders.arrivals,
            scores: scratch.at(self.scores),
            buckets: scratch.at(self.buckets),
            score_ranges: scratch.at(self.score_ranges),
            q_perm: orders.q_perm.unwrap_or(ptr::null_mut()),
            key_guide: scratch.at(self.key_guide),
            prefix_factors: scratch.at(self.prefix_factors),
            prefix_score: orders.prefix_score.unwrap_or(ptr::null_mut()),
            q_strides: call.q.strides,
            k_strides: call.k.strides,
            kv_perm_head_stride: group.keys as i64,
            coefficient_batch_stride: shape.num_heads() as i64 * coefficient_head_stride,
            coefficient_head_stride,
            batch: to_i32("batch", shape.batch())?,
            num_heads: to_i32("num_heads", shape.num_heads())?,
            num_kv_heads: to_i32("num_kv_heads", shape.num_kv_heads())?,
            q_len: to_i32("q_len", shape.q_len())?,
            k_len: to_i32("k_len", shape.k_len())?,
            segment_len: to_i32("segment_len", plan.segment_len)?,
            first_segment: to_i32("segments", plan.segments[group.first].index)?,
            num_segments: to_i32("segments", segments)?,
            coefficient_segment: to_i32("segments", plan.segments[group.first].index)?,
            front_sink: to_i32("front_sink", config.front_sink().min(shape.k_len()))?,
            recent: to_i32("recent", config.recent().min(shape.k_len()))?,
            ranked_rows: to_i32("q_len", plan.ranked_rows())?,
            sort_buckets: to_i32("sort buckets", sort.buckets)?,
            sort_window: to_i32("sort window", sort.window)?,
            softmax_scale: call.scale.softmax_scale,
            second_cumulant: match config.key_score() {
                KeyScore::MeanQuery => 0.0,
                KeyScore::SecondCumulant { c } => c,
            },
            sorted_keys: sorted_keys(config, plan),
            zeroed: to_i32("counters", orders.zeroed)?,
        };
        let [batch, heads, kv_heads] = [shape.batch(), shape.num_heads(), shape.num_kv_heads()];
        // SAFETY: these kernels take RankingParams. The regions have room for the largest group, and the scratch memory
        // is released on this stream after the launches.
        unsafe {
            if orders.q_perm.is_some() && !self.is_given {
                let shared_bytes = query_order_shared_bytes(plan.segment_len);
                let limit = call.launcher.shared_limit(call.function(Kernel::QueryOrder))?;
                if shared_bytes > limit {
                    let max = limit / query_order_shared_bytes(1);
                    return Err(CudaError::PermutedSegment { max, got: plan.segment_len });
                }
                call.launch(Kernel::KeyGuide, &params, Grid::Blocks([kv_heads, batch, 1]))?;
                let blocks = [heads, segments, batch];
                let grid = Grid::Shaped { blocks, threads: None, shared_bytes: Some(shared_bytes) };
                call.launch(Kernel::QueryOrder, &params, grid)?;
            }
            if longest == 0 {
                return Ok(());
            }
            if orders.prefix_score.is_some() {
                call.launch(Kernel::PrefixFactors, &params, Grid::Blocks([kv_heads, segments, batch]))?;
            }
            let splits = moment_splits(plan.segment_len);
            call.launch(Kernel::Moments, &params, Grid::Blocks([heads, segments, batch * splits]))?;
            if self.is_given {
                return Ok(());
            }
            let rows = segments * shape.group_size();
            let block = ScoreShape::fitting(rows, shape.head_dim());
            let [y, z] = [rows.div_ceil(block.rows()), batch * kv_heads];
            let blocks = [score_blocks(longest / SCORE_BLOCK, y * z, call.launcher.multiprocessors()), y, z];
            let (threads, shared_bytes) = (Some(32 * block.warps), Some(block.shared_bytes));
            call.launch(Kernel::Scores, &params, Grid::Shaped { blocks, threads, shared_bytes })?;
            let blocks = [batch * heads, segments, blocks_of_row];
            let grid = Grid::Shaped { blocks, threads: Some(sort.threads), shared_bytes: Some(sort.shared_bytes()) };
            call.launch(Kernel::Sort, &params, grid)
        }
    }
}
