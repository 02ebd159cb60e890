//! Exact probe queries on the GPU: their attention, the correction of the other rows, and the measured error.

use std::ffi::c_void;
use std::ptr;

use s2o_core::{ErrorControl, Mask, Plan, ProbeStats, S2oConfig, probe_position};
use s2o_cuda::{CudaError, Grid, Region, Regions, Scratch, View, to_i32};
use s2o_kernels::params::{AttnParams, PROBE_SUMS, ProbeParams, RowState, SplitParams, Strides, UnitList};
use s2o_kernels::{Kernel, TILE_K, TILE_Q};

use super::call::Call;
use super::dense::splits;
use super::segment_group::SegmentGroup;

/// Parts of the keys per multiprocessor: items end at very different lengths.
const SPLITS_PER_SM: usize = 8;

/// The probes of a call before its dense tail, with their scratch memory.
pub(super) struct Probes {
    stride: usize,
    first_run: usize,
    /// Number of probes of a head.
    count: usize,
    /// Parts of the keys, and key tiles of each.
    splits: [usize; 2],
    /// Of the visited keys, for each head and row.
    lse: Region<f32>,
    last_gain: Region<f32>,
    positions: Region<i32>,
    // (batch, probes * group, num_kv_heads, head_dim): the heads of a KV head share the tiles.
    queries: Region<u16>,
    exact: Region<u16>,
    exact_lse: Region<f32>,
    next_item: Region<i32>,
    partial_out: Region<f32>,
    partial_state: Region<RowState>,
    tail_value: Region<f32>,
    tail_scale: Region<f32>,
    sums: Region<[f64; PROBE_SUMS]>,
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
    /// For each head and segment: tiles and number of the passes that were in vain.
    repeated: Region<[i32; 2]>,
}

impl Probes {
    /// `None` if the plan has no probes, or none of them is in this call.
    pub(super) fn new(regions: &mut Regions, call: &Call, plan: &Plan, config: &S2oConfig) -> Option<Self> {
        let (shape, stride) = (&call.shape, plan.probe_stride?);
        let positions = shape.q_offset()..shape.q_offset() + plan.ranked_rows();
        let runs = positions.start / stride..positions.end.div_ceil(stride);
        let mut own = runs.filter(|&run| positions.contains(&probe_position(run, stride)));
        let first_run = own.next()?;
        let count = 1 + own.count();
        let heads = shape.batch() * shape.num_heads();
        let rows = heads * count;
        let tiles = shape.batch() * shape.num_kv_heads() * (count * shape.group_size()).div_ceil(TILE_Q);
        let key_tiles = positions.end.div_ceil(TILE_K);
        let wanted = splits(call, SPLITS_PER_SM, tiles, key_tiles);
        let per_split = key_tiles.div_ceil(wanted);
        let splits = [key_tiles.div_ceil(per_split), per_split];
        let parts = tiles * splits[0] * TILE_Q;
        let units = heads * plan.segments.len();
        Some(Self {
            stride,
            first_run,
            count,
            splits,
            lse: regions.add(heads * shape.q_len()),
            last_gain: regions.add(heads * shape.q_len()),
            positions: regions.add(count),
            queries: regions.add(rows * shape.head_dim()),
            exact: regions.add(rows * shape.head_dim()),
            exact_lse: regions.add(rows),
            next_item: regions.add(1),
            partial_out: regions.add(parts * shape.head_dim()),
            partial_state: regions.add(parts),
            tail_value: regions.add(units * shape.head_dim()),
            tail_scale: regions.add(units),
            sums: regions.add(units),
            permuted: config.q_perm(),
            control: config.max_error().map(|bound| Control {
                max_error: bound.into(),
                unit_list: regions.add(units),
                unit_count: regions.add(1),
                next_pass: regions.add(units),
                repeated: regions.add(units),
            }),
        })
    }

    /// What the sparse pass writes for the probes: log-sum-exp and last gain of its rows.
    pub(super) fn row_results(&self, scratch: &Scratch) -> [*mut f32; 2] {
        [scratch.at(self.lse), scratch.at(self.last_gain)]
    }

    /// Enqueues the exact attention of the probes.
    pub(super) fn attend(&self, call: &Call, scratch: &Scratch, plan: &Plan) -> Result<(), CudaError> {
        let shape = &call.shape;
        scratch.zero(self.next_item)?;
        if let Some(control) = &self.control {
            scratch.zero(control.next_pass)?;
            scratch.zero(control.repeated)?;
        }
        let (params, queries) = self.params(call, scratch, plan)?;
        let rows = shape.batch() * queries.dims[1] * shape.num_kv_heads();
        let tiles = shape.batch() * shape.num_kv_heads() * queries.dims[1].div_ceil(TILE_Q);
        // SAFETY: the kernels take ProbeParams, and `merge` the SplitParams in it. The regions have room for every
        // probe, and the scratch memory is released on this stream after the launches.
        unsafe {
            let heads = shape.batch() * shape.num_heads();
            call.launch(Kernel::ProbeQueries, &params, Grid::Warps { rows: heads * self.count })?;
            call.launch_with(Kernel::Probes, queries, &params, Grid::Persistent { items: tiles * self.splits[0] })?;
            call.launch(Kernel::Merge, &params.split, Grid::Warps { rows })
        }
    }

    /// Whether the error has a bound.
    pub(super) fn have_bound(&self) -> bool {
        self.control.is_some()
    }

    /// The heads and segments of a group that need pass `pass`, or all of them for pass 0. Enqueues the kernel that
    /// lists them, if the error has a bound.
    pub(super) fn units(
        &self,
        call: &Call,
        scratch: &Scratch,
        plan: &Plan,
        group: &SegmentGroup,
        pass: usize,
    ) -> Result<UnitList, CudaError> {
        let Some(control) = &self.control else { return Ok(UnitList::ALL) };
        let params = ProbeParams {
            group_first: to_i32("segments", group.first)?,
            group_segments: to_i32("segments", group.len())?,
            pass: to_i32("passes", pass)?,
            ..self.params(call, scratch, plan)?.0
        };
        // SAFETY: the kernel takes ProbeParams; the list has room for every head and segment.
        unsafe { call.launch(Kernel::ProbeUnits, &params, Grid::Blocks([1, 1, 1]))? };
        Ok(UnitList { units: scratch.at(control.unit_list), count: scratch.at(control.unit_count) })
    }

    /// Enqueues the kernel that measures `units`, of `count` at most, after pass `pass` over their rows.
    pub(super) fn measure(
        &self,
        call: &Call,
        scratch: &Scratch,
        plan: &Plan,
        (units, count): (UnitList, usize),
        (pass, tiles_visited): (usize, *const i32),
    ) -> Result<(), CudaError> {
        let pass = to_i32("passes", pass)?;
        let params = ProbeParams { units, pass, tiles_visited, ..self.params(call, scratch, plan)?.0 };
        // SAFETY: the kernel takes ProbeParams; the regions have room for every head and segment.
        unsafe { call.launch(Kernel::ProbeTails, &params, Grid::Blocks([count, 1, 1])) }
    }

    /// Enqueues the correction of all rows, after the last measurement.
    pub(super) fn correct(&self, call: &Call, scratch: &Scratch, plan: &Plan) -> Result<(), CudaError> {
        let (params, _) = self.params(call, scratch, plan)?;
        // A block has 256 threads, each with eight elements.
        let rows = 2048 / call.shape.head_dim();
        let heads = call.shape.batch() * call.shape.num_heads();
        // SAFETY: the kernel takes ProbeParams, and the measurement has written the tails.
        unsafe {
            let blocks = [plan.ranked_rows().div_ceil(rows), heads, 1];
            call.launch(Kernel::ProbeCorrection, &params, Grid::Blocks(blocks))
        }
    }

    /// The parameters of all these kernels, and the queries of the probes.
    fn params(&self, call: &Call, scratch: &Scratch, plan: &Plan) -> Result<(ProbeParams, View), CudaError> {
        let shape = &call.shape;
        let attn = call.params(Mask::Causal, scratch.at(self.next_item))?;
        let (kv_heads, head_dim) = (shape.num_kv_heads(), shape.head_dim());
        let dims = [shape.batch(), self.count * shape.group_size(), kv_heads, head_dim];
        let [_, rows, ..] = dims;
        let seq = (kv_heads * head_dim) as i64;
        let strides = Strides { batch: rows as i64 * seq, seq, head: head_dim as i64 };
        let queries = View { address: scratch.at(self.queries) as u64, dims, strides };
        let split = SplitParams {
            attn: AttnParams {
                q: queries.address as *const c_void,
                out: scratch.at(self.exact).cast(),
                lse: scratch.at(self.exact_lse),
                q_strides: strides,
                out_strides: strides,
                num_heads: attn.num_kv_heads,
                q_len: to_i32("probes", rows)?,
                ..attn
            },
            partial_out: scratch.at(self.partial_out),
            partial_state: scratch.at(self.partial_state),
            first_row: 0,
            num_splits: to_i32("splits", self.splits[0])?,
            tiles_per_split: to_i32("tiles per split", self.splits[1])?,
            head_dim: to_i32("head_dim", head_dim)?,
        };
        let control = self.control.as_ref();
        let params = ProbeParams {
            split,
            q: attn.q,
            out: attn.out,
            lse: scratch.at(self.lse),
            last_gain: scratch.at(self.last_gain),
            positions: scratch.at(self.positions),
            tail_value: scratch.at(self.tail_value),
            tail_scale: scratch.at(self.tail_scale),
            sums: scratch.at(self.sums).cast(),
            units: UnitList::ALL,
            unit_list: control.map_or(ptr::null_mut(), |control| scratch.at(control.unit_list)),
            unit_count: control.map_or(ptr::null_mut(), |control| scratch.at(control.unit_count)),
            next_pass: control.map_or(ptr::null_mut(), |control| scratch.at(control.next_pass)),
            repeated: control.map_or(ptr::null_mut(), |control| scratch.at(control.repeated)),
            tiles_visited: ptr::null(),
            q_strides: attn.q_strides,
            out_strides: attn.out_strides,
            max_error: control.map_or(0.0, |control| control.max_error),
            reach: ErrorControl::REACH.into(),
            num_heads: attn.num_heads,
            group: to_i32("heads", shape.group_size())?,
            q_len: attn.q_len,
            ranked_rows: to_i32("q_len", plan.ranked_rows())?,
            probes: to_i32("probes", self.count)?,
            first_run: to_i32("probes", self.first_run)?,
            stride: to_i32("probe stride", self.stride)?,
            segment_len: to_i32("segment_len", plan.segment_len)?,
            first_segment: to_i32("segments", plan.segments[0].index)?,
            segments: to_i32("segments", plan.segments.len())?,
            group_first: 0,
            group_segments: 0,
            pass: 0,
            permuted: i32::from(self.permuted),
        };
        Ok((params, queries))
    }

    /// Waits for the GPU and reads what the probes measured, for each head and each segment that has any.
    pub(super) fn stats(&self, call: &Call, scratch: &Scratch, plan: &Plan) -> Result<Vec<Vec<ProbeStats>>, CudaError> {
        let sums = scratch.download(self.sums)?;
        let repeated = match &self.control {
            Some(control) => scratch.download(control.repeated)?,
            None => vec![[0; 2]; sums.len()],
        };
        let positions: Vec<usize> =
            (self.first_run..).take(self.count).map(|run| probe_position(run, self.stride)).collect();
        let q_offset = call.shape.q_offset();
        let mut segments = Vec::new();
        for segment in plan.segments.iter().filter(|segment| !segment.rows.is_empty()) {
            let [begin, end] = [segment.rows.start, segment.rows.end].map(|row| q_offset + row);
            let own = &positions[positions.partition_point(|&p| p < begin)..positions.partition_point(|&p| p < end)];
            segments.push((segment.index, own.len(), own.iter().map(|p| p + 1).sum::<usize>()));
        }
        let of_head = |head: usize| {
            let stats = segments.iter().map(|&(index, probes, keys)| {
                let unit = head * plan.segments.len() + index - plan.segments[0].index;
                let [tiles, repeats] = repeated[unit].map(|count| count as usize);
                let tiles = keys as f64 / (TILE_Q * TILE_K) as f64 + tiles as f64;
                let mut stats = ProbeStats::from_sums(index, probes, tiles, sums[unit]);
                stats.repeats = repeats;
                stats
            });
            stats.collect()
        };
        Ok((0..sums.len() / plan.segments.len()).map(of_head).collect())
    }
}
