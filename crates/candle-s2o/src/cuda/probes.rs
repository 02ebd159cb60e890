//! Exact probe queries on the GPU: their attention, the correction of the other rows, and the measured error. All
//! kernels work on a group of segments after its sparse pass.

use std::ffi::c_void;
use std::ptr;

use s2o_core::{ErrorControl, Mask, Plan, S2oConfig};
use s2o_cuda::{CudaError, Grid, Region, Regions, Scratch, View, to_i32};
use s2o_kernels::params::{AttnParams, ProbeParams, RowState, SplitParams, Strides, UnitList};
use s2o_kernels::{Kernel, MERGE_WARPS, TILE_K, TILE_Q};

use super::call::Call;
use super::counters::Counters;
use super::device_stats::Counts;
use super::segment_group::SegmentGroup;
use super::share::Share;

/// Most parts of a prompt's keys. Items end at very different lengths, so a multiprocessor needs several, and the few heads of
/// a share have few tiles. The number must not depend on the heads or the chunk of a call: sums in other parts round
/// differently, and the heads of a model that several GPUs share would not have the output that they have on one.
const SPLITS: usize = 32;
/// Fewest key tiles of a part, whose first loads wait for memory.
pub(super) const MIN_TILES_OF_PART: usize = 16;
/// Warps of a block, and positions of a block that corrects rows (probe_steps.cu).
pub(super) const WARPS: usize = 8;
const CORRECTED: usize = 128;

/// Queries side by side, `(batch, rows, num_kv_heads, head_dim)`: the heads of a KV head share the tiles.
pub(super) fn side_by_side(call: &Call, queries: *mut u16, rows: usize) -> View {
    let (kv_heads, head_dim) = (call.shape.num_kv_heads(), call.shape.head_dim());
    let seq = (kv_heads * head_dim) as i64;
    let strides = Strides { batch: rows as i64 * seq, seq, head: head_dim as i64 };
    let dims = [call.shape.batch(), rows, kv_heads, head_dim];
    View { address: queries as u64, dims, strides, box_rows: TILE_Q }
}

/// The probes of a call before its dense tail, with scratch memory for the largest group.
pub(super) struct Probes {
    stride: usize,
    /// Runs of a segment.
    slots: usize,
    // For each head and row: the log-sum-exp of the visited keys, the norm of the output, and an estimate of the mean weight of
    // the keys before the segment.
    lse: Region<f32>,
    out_norm: Region<f32>,
    prefix_score: Region<f32>,
    // For each slot and head.
    positions: Region<i32>,
    weights: Region<f32>,
    // (batch, slots * group, num_kv_heads, head_dim): the heads of a KV head share the tiles.
    queries: Region<u16>,
    exact: Region<u16>,
    exact_lse: Region<f32>,
    partial_out: Region<f32>,
    partial_state: Region<RowState>,
    // For each head and segment of the call.
    tail_value: Region<f32>,
    tail_scale: Region<f32>,
    permuted: bool,
    /// With a bound on the error.
    control: Option<Control>,
}

/// Scratch memory of the passes that keep the measured error below a bound.
struct Control {
    max_error: f64,
    unit_list: Region<i32>,
    unit_count: Region<i32>,
    /// For each head and segment: the pass that it needs, 0 for none.
    next_pass: Region<i32>,
}

/// Some heads of a call, its plan, its scratch memory, and its statistics in memory of their own.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) share: &'a Share,
    pub(super) plan: &'a Plan,
    pub(super) scratch: &'a Scratch,
    pub(super) counters: &'a Counters,
    pub(super) counts: Counts,
    pub(super) memory: &'a Scratch,
}

/// Tiles of the exact attention of a group, parts of their keys, and key tiles of a part.
struct Split {
    tiles: usize,
    parts: usize,
    per_part: usize,
}

impl Split {
    fn new(call: &Call, plan: &Plan, group: &SegmentGroup, slots: usize) -> Self {
        let shape = &call.shape;
        let tiles = |segments: usize| {
            shape.batch() * shape.num_kv_heads() * (segments * slots * shape.group_size()).div_ceil(TILE_Q)
        };
        // Parts of the same size in all groups: the cut into groups does not change the output either.
        let per_part = plan.prompt_len.div_ceil(TILE_K).div_ceil(SPLITS).max(MIN_TILES_OF_PART);
        let end = plan.segments[group.end - 1].start + plan.segment_len;
        let parts = end.min(shape.k_len()).div_ceil(TILE_K).div_ceil(per_part);
        Self { tiles: tiles(group.len()), parts, per_part }
    }
}

impl Probes {
    /// `None` if the plan has no probes.
    pub(super) fn new(
        regions: &mut Regions,
        call: &Call,
        plan: &Plan,
        groups: &[SegmentGroup],
        config: &S2oConfig,
    ) -> Option<Self> {
        let (shape, stride) = (&call.shape, plan.probe_stride?);
        // Segments begin at multiples of their length.
        let slots = plan.segment_len.div_ceil(stride) + usize::from(!plan.segment_len.is_multiple_of(stride));
        let heads = shape.batch() * shape.num_heads();
        let most = |of: &dyn Fn(&SegmentGroup) -> usize| groups.iter().map(of).max().unwrap_or(0);
        let rows = heads * slots * most(&SegmentGroup::len);
        let parts = most(&|group| {
            let split = Split::new(call, plan, group, slots);
            split.tiles * split.parts * TILE_Q
        });
        let units = heads * plan.segments.len();
        Some(Self {
            stride,
            slots,
            lse: regions.add(heads * shape.q_len()),
            out_norm: regions.add(heads * shape.q_len()),
            prefix_score: regions.add(heads * shape.q_len()),
            positions: regions.add(rows),
            weights: regions.add(rows),
            queries: regions.add(rows * shape.head_dim()),
            exact: regions.add(rows * shape.head_dim()),
            exact_lse: regions.add(rows),
            partial_out: regions.add(parts * shape.head_dim()),
            partial_state: regions.add(parts),
            tail_value: regions.add(units * shape.head_dim()),
            tail_scale: regions.add(units),
            permuted: config.q_perm(),
            control: config.max_error().map(|bound| Control {
                max_error: bound.into(),
                unit_list: regions.add(units),
                unit_count: regions.add(1),
                next_pass: regions.add(units),
            }),
        })
    }

    /// What the sparse pass writes for the probes: log-sum-exp and norm of the output of its rows.
    pub(super) fn row_results(&self, parts: Parts<'_>) -> [*mut f32; 2] {
        [self.lse, self.out_norm].map(|region| Self::rows(region, parts))
    }

    /// What the ranking writes for the probes, for all rows of the call.
    pub(super) fn prefix_score(&self, scratch: &Scratch) -> *mut f32 {
        scratch.at(self.prefix_score)
    }

    /// The rows of a share.
    fn rows(region: Region<f32>, Parts { share, scratch, .. }: Parts<'_>) -> *mut f32 {
        scratch.at(region).wrapping_add(share.heads_before * share.call.shape.q_len())
    }

    /// Whether the error has a bound.
    pub(super) fn have_bound(&self) -> bool {
        self.control.is_some()
    }

    /// Zeroes the counts of passes. Must be called once before the first group.
    pub(super) fn prepare(&self, Parts { scratch, counts, memory, .. }: Parts<'_>) -> Result<(), CudaError> {
        let Some(control) = &self.control else { return Ok(()) };
        scratch.zero(control.next_pass)?;
        memory.zero(counts.repeated)
    }

    /// Enqueues the choice of a group's probes and their exact attention.
    pub(super) fn attend(&self, parts: Parts<'_>, group: &SegmentGroup) -> Result<(), CudaError> {
        let Parts { share: Share { call, .. }, plan, scratch, counters, .. } = parts;
        let shape = &call.shape;
        let (mut params, queries) = self.params(parts, group)?;
        params.split.attn.next_item = counters.next_item(scratch);
        let split = Split::new(call, plan, group, self.slots);
        let heads = shape.batch() * shape.num_heads();
        let slots = group.len() * self.slots;
        // SAFETY: the kernels take ProbeParams, and `merge` the SplitParams in it. The regions have room for any group,
        // and the scratch memory is released on this stream after the launches.
        unsafe {
            call.launch(Kernel::ProbeChoice, &params, Grid::Blocks([slots.div_ceil(WARPS), heads, 1]))?;
            call.launch_with(Kernel::Probes, queries, &params, Grid::Persistent { items: split.tiles * split.parts })?;
            call.launch(Kernel::Merge, &params.split, Grid::Warps { rows: heads * slots * MERGE_WARPS })
        }
    }

    /// The heads and segments of a group that need pass `pass`, or all of them for pass 0. Enqueues the kernel that
    /// lists them, if the error has a bound.
    pub(super) fn units(&self, parts: Parts<'_>, group: &SegmentGroup, pass: usize) -> Result<UnitList, CudaError> {
        let Some(control) = &self.control else { return Ok(UnitList::ALL) };
        let params = ProbeParams { pass: to_i32("passes", pass)?, ..self.params(parts, group)?.0 };
        // SAFETY: the kernel takes ProbeParams; the list has room for every head and segment.
        unsafe { parts.share.call.launch(Kernel::ProbeUnits, &params, Grid::Blocks([1, 1, 1]))? };
        let at = |region: Region<i32>| parts.scratch.at(region).cast_const();
        Ok(UnitList { units: at(control.unit_list), count: at(control.unit_count) })
    }

    /// Enqueues the kernel that measures `units` of a group after pass `pass` over their rows.
    pub(super) fn measure(
        &self,
        parts: Parts<'_>,
        group: &SegmentGroup,
        units: UnitList,
        pass: usize,
    ) -> Result<(), CudaError> {
        let pass = to_i32("passes", pass)?;
        let params = ProbeParams { units, pass, ..self.params(parts, group)?.0 };
        let call = &parts.share.call;
        let most = call.shape.batch() * call.shape.num_heads() * group.len();
        // SAFETY: the kernel takes ProbeParams; the regions have room for every head and segment.
        unsafe { call.launch(Kernel::ProbeTails, &params, Grid::Blocks([most, 1, 1])) }
    }

    /// Enqueues the correction of a group's rows, after its last measurement.
    pub(super) fn correct(&self, parts: Parts<'_>, group: &SegmentGroup) -> Result<(), CudaError> {
        let Parts { share: Share { call, .. }, plan, .. } = parts;
        let (params, _) = self.params(parts, group)?;
        let rows = plan.segments[group.first].rows.start..plan.segments[group.end - 1].rows.end;
        let offset = call.shape.k_len() - call.shape.q_len();
        let corrected = (offset + rows.end).div_ceil(CORRECTED) - (offset + rows.start) / CORRECTED;
        let heads = call.shape.batch() * call.shape.num_heads();
        // SAFETY: the kernel takes ProbeParams, and the measurement has written the tails.
        unsafe { call.launch(Kernel::ProbeCorrection, &params, Grid::Blocks([corrected, heads, 1])) }
    }

    /// The parameters of all these kernels, without a counter of work items, and the queries of the probes.
    fn params(&self, parts: Parts<'_>, group: &SegmentGroup) -> Result<(ProbeParams, View), CudaError> {
        let Parts { share, plan, scratch, counts, memory, .. } = parts;
        let Share { call, heads_before, kv_heads_before, .. } = share;
        let shape = &call.shape;
        let attn = call.params(Mask::Causal, ptr::null_mut())?;
        let (kv_heads, head_dim) = (shape.num_kv_heads(), shape.head_dim());
        let slots = group.len() * self.slots;
        let rows = slots * shape.group_size();
        // Every share has its rows side by side.
        let element_before = kv_heads_before * rows * head_dim;
        let queries = side_by_side(call, scratch.at(self.queries).wrapping_add(element_before), rows);
        let cut = Split::new(call, plan, group, self.slots);
        // The partial results of the heads before these.
        let partial_rows = cut.tiles / (shape.batch() * kv_heads) * kv_heads_before * cut.parts * TILE_Q;
        let units_before = heads_before * plan.segments.len();
        let [lse, out_norm] = self.row_results(parts);
        let split = SplitParams {
            attn: AttnParams {
                q: queries.address as *const c_void,
                out: scratch.at(self.exact).wrapping_add(element_before).cast(),
                lse: scratch.at(self.exact_lse).wrapping_add(kv_heads_before * rows),
                q_strides: queries.strides,
                out_strides: queries.strides,
                num_heads: attn.num_kv_heads,
                q_len: to_i32("probes", rows)?,
                ..attn
            },
            partial_out: scratch.at(self.partial_out).wrapping_add(partial_rows * head_dim),
            partial_state: scratch.at(self.partial_state).wrapping_add(partial_rows),
            first_row: 0,
            num_splits: to_i32("splits", cut.parts)?,
            tiles_per_split: to_i32("tiles per split", cut.per_part)?,
            head_dim: to_i32("head_dim", head_dim)?,
            tile_rows: TILE_Q as i32,
            merge_warps: MERGE_WARPS as i32,
            group: 1,
        };
        let control = self.control.as_ref();
        let params = ProbeParams {
            split,
            q: attn.q,
            out: attn.out,
            lse,
            out_norm,
            prefix_score: Self::rows(self.prefix_score, parts).cast_const(),
            positions: scratch.at(self.positions).wrapping_add(heads_before * slots),
            weights: scratch.at(self.weights).wrapping_add(heads_before * slots),
            tail_value: scratch.at(self.tail_value).wrapping_add(units_before * head_dim),
            tail_scale: scratch.at(self.tail_scale).wrapping_add(units_before),
            sums: memory.at(counts.sums).wrapping_add(units_before).cast(),
            units: UnitList::ALL,
            unit_list: control.map_or(ptr::null_mut(), |control| scratch.at(control.unit_list)),
            unit_count: control.map_or(ptr::null_mut(), |control| scratch.at(control.unit_count)),
            next_pass: control.map_or(ptr::null_mut(), |control| scratch.at(control.next_pass)),
            repeated: memory.at(counts.repeated),
            tiles_visited: counts.tiles_visited_of(memory, plan, *heads_before).cast_const(),
            q_strides: attn.q_strides,
            out_strides: attn.out_strides,
            max_error: control.map_or(0.0, |control| control.max_error),
            reach: ErrorControl::REACH.into(),
            num_heads: attn.num_heads,
            group: to_i32("heads", shape.group_size())?,
            q_len: attn.q_len,
            ranked_rows: to_i32("q_len", plan.ranked_rows())?,
            stride: to_i32("probe stride", self.stride)?,
            slots: to_i32("probes", self.slots)?,
            segment_len: to_i32("segment_len", plan.segment_len)?,
            first_segment: to_i32("segments", plan.segments[0].index)?,
            segments: to_i32("segments", plan.segments.len())?,
            group_first: to_i32("segments", group.first)?,
            group_segments: to_i32("segments", group.len())?,
            pass: 0,
            permuted: i32::from(self.permuted),
        };
        Ok((params, queries))
    }
}
