//! S2O on the GPU. Groups of segments whose key orders fit the workspace are ranked and then attended, from the last
//! group to the first. The dense tail runs next to them on another stream, or follows.

use std::cell::OnceCell;
use std::{iter, ptr, slice};

use s2o_core::{
    ErrorControl, GainFrame, Mask, Permutation, Plan, Ranking, S2oConfig, S2oError, Segment, SegmentOrder, StopRule,
    TriggeringTile,
};
use s2o_cuda::{Aside, CudaError, Grid, Region, Regions, Scratch, to_i32};
use s2o_kernels::params::{AttnParams, RowState, S2oParams, UnitList};
use s2o_kernels::{Kernel, TILE_K, TILE_Q};

use super::call::{Call, CudaOp};
use super::counters::Counters;
use super::dense;
use super::device_stats::{Counts, DeviceStats};
use super::probes::{Parts, Probes};
use super::ranking::{Orders, Ranker};
use super::segment_group::{SegmentGroup, groups};
use super::share::Share;
use super::tail;
use crate::error::AttnError;
use crate::methods::gpu_break_even;
use crate::ops::{RankOp, S2oOp};
use crate::pending_stats::PendingStats;

impl CudaOp for S2oOp {
    fn run(&self, call: &Call) -> Result<Option<PendingStats>, AttnError> {
        let (shape, wants_stats) = (&call.shape, self.wants_stats);
        let (config, prompt_len) = self.settings(shape);
        let config = &*config;
        check_options(config)?;
        if wants_stats {
            call.launcher.refuse_capture("reading statistics", "ask for none in the capture")?;
        }
        let plan = plan(call, config, prompt_len)?;
        // The last chunk of a prompt may lie entirely in the dense tail.
        if plan.is_dense() || plan.ranked_rows() == 0 {
            if plan.is_dense() {
                dense::launch(call, Mask::Causal, 0, None)?;
            } else {
                tail::launch(call, 0)?;
            }
            let stats = || plan.stats(shape, config, |_, _, _| 0, Vec::new());
            return Ok(wants_stats.then(|| stats().into()));
        }
        let ranking = self.ranking.as_deref();
        if let Some(ranking) = ranking {
            plan.check_ranking(shape, ranking).map_err(S2oError::from)?;
        }
        let launch = Launch::new(call, config, &plan, ranking)?;
        launch.attend()?;
        let Launch { counts, memory, .. } = launch;
        let Some(mut memory) = memory.into_inner().filter(|_| wants_stats) else { return Ok(None) };
        memory.outlive_call()?;
        Ok(Some(DeviceStats::new(*shape, config.clone(), plan.clone(), counts, memory).into()))
    }
}

/// The orders on the host: `ranking[b * num_heads + h][s]` for the `s`-th segment of the plan.
impl CudaOp for RankOp {
    fn run(&self, call: &Call) -> Result<Ranking, AttnError> {
        let (config, prompt_len) = self.0.settings(&call.shape);
        let config = &*config;
        check_options(config)?;
        call.launcher.refuse_capture("reading orders", "rank outside the capture")?;
        let plan = plan(call, config, prompt_len)?;
        Launch::new(call, config, &Plan { probe_stride: None, ..plan }, None)?.rank_only()
    }
}

fn plan(call: &Call, config: &S2oConfig, prompt_len: usize) -> Result<Plan, S2oError> {
    Plan::new(config, &call.shape, prompt_len, gpu_break_even(&call.launcher, call.shape.head_dim()))
}

fn check_options(config: &S2oConfig) -> Result<(), CudaError> {
    for (name, got, expected) in [("tile-q", config.tile_q(), TILE_Q), ("tile-k", config.tile_k(), TILE_K)] {
        if got != expected {
            return Err(CudaError::Tile { name, got });
        }
    }
    Ok(())
}

/// A call with its scratch memory, and its statistics in memory of their own.
struct Launch<'a> {
    call: &'a Call,
    config: &'a S2oConfig,
    plan: &'a Plan,
    groups: Vec<SegmentGroup>,
    /// All groups as one, without orders.
    whole: SegmentGroup,
    scratch: Scratch,
    counters: Counters,
    /// The ranking's first kernel is that of the call, and zeroes the counters.
    is_ranked_first: bool,
    kv_perm: Region<i32>,
    /// Absent if the orders are given and there are no probes.
    ranker: Option<Ranker>,
    /// Orders that replace those of Algorithm 1.
    given: Option<&'a Ranking>,
    /// With query permutation: the orders and the states of the rows.
    permuted: Option<(Region<i32>, Region<RowState>)>,
    probes: Option<Probes>,
    counts: Counts,
    kept: Regions,
    /// Memory for `kept`, allocated while the first kernels run: the GPU does not wait for it.
    memory: OnceCell<Scratch>,
}

impl<'a> Launch<'a> {
    fn new(
        call: &'a Call,
        config: &'a S2oConfig,
        plan: &'a Plan,
        given: Option<&'a Ranking>,
    ) -> Result<Self, AttnError> {
        let shape = &call.shape;
        let heads = shape.batch() * shape.num_heads();
        let groups = groups(&plan.segments, heads, config.workspace_cap())?;
        let mut regions = Regions::default();
        let segments = groups.iter().map(SegmentGroup::len).max().unwrap_or(0);
        // Pass 1, at most two kernels for each pass over a group, and two for each share.
        let launches = 1 + groups.len() * 2 * ErrorControl::PASSES + 2 * Share::MOST;
        let counters = Counters::new(&mut regions, heads * segments, launches);
        let kv_perm = regions.add(heads * groups.iter().map(|group| group.keys).max().unwrap_or(0));
        let rows = heads * shape.q_len();
        let permuted = config.q_perm().then(|| (regions.add(rows), regions.add(rows)));
        let first = groups.last().map_or(0, |group| group.first);
        let whole = SegmentGroup { first, end: groups.first().map_or(0, |group| group.end), keys: 0 };
        // Only a pass that repeats needs the orders of its group.
        let of_probes = if config.max_error().is_some() { &groups[..] } else { slice::from_ref(&whole) };
        let probes = Probes::new(&mut regions, call, plan, of_probes, config);
        let is_needed = given.is_none() || probes.is_some();
        let ranker = is_needed.then(|| Ranker::new(&mut regions, call, plan, &groups, given.is_some())).transpose()?;
        let scratch = call.allocate(&regions)?;
        let mut kept = Regions::default();
        let counts = Counts::new(&mut kept, shape, plan, config);
        // One launch less before the first kernel, while the GPU is idle.
        let zeroes = ranker.is_some() && Ranker::zeroes(plan, probes.is_some());
        let is_ranked_first = permuted.is_none() && zeroes && groups.first().is_some_and(|group| group.keys > 0);
        if !is_ranked_first {
            counters.zero(&scratch)?;
        }
        Ok(Self {
            call,
            config,
            plan,
            groups,
            whole,
            scratch,
            counters,
            is_ranked_first,
            kv_perm,
            ranker,
            given,
            permuted,
            probes,
            counts,
            kept,
            memory: OnceCell::new(),
        })
    }

    /// Enqueues the call.
    fn attend(&self) -> Result<(), CudaError> {
        let control = ErrorControl::new(self.config, self.plan);
        let first_pass = (control.config(0), UnitList::ALL);
        let whole = Share::whole(self.call);
        let bounded = self.probes.as_ref().filter(|probes| probes.have_bound());
        if let Some(probes) = bounded {
            probes.prepare(self.parts(&whole)?)?;
        }
        if let Some((q_perm, _)) = self.permuted {
            self.enqueue(&whole, Kernel::Pass1, &self.whole, first_pass)?;
            if let Some(ranking) = self.given {
                self.upload_q_perm(q_perm, ranking)?;
            }
        }
        for (i, group) in self.groups.iter().enumerate() {
            self.order(group)?;
            if bounded.is_none() && i + 1 == self.groups.len() {
                return self.finish(group, first_pass);
            }
            self.enqueue(&whole, self.kernel(first_pass.0), group, first_pass)?;
            if let Some(probes) = bounded {
                self.keep_bound(probes, group, &control)?;
            }
        }
        self.attend_tail(self.call)
    }

    /// Enqueues the last launch of the sparse kernel and the work after it. The kernel leaves multiprocessors idle while its
    /// last, longest items end. So shares of the heads follow each other on several streams, and the dense tail comes after
    /// the first. A single share of a whole prompt has many short items, so the tail begins before it and does not outlast it.
    fn finish(&self, group: &SegmentGroup, first_pass: (&S2oConfig, UnitList)) -> Result<(), CudaError> {
        let launcher = &self.call.launcher;
        // Without probes too little work follows that could run next to another share.
        let most = if self.probes.is_some() && !launcher.is_timed() { Share::MOST } else { 1 };
        let parts = Share::parts(self.call, most);
        // Before the other streams begin: their kernels write it.
        self.memory()?;
        let asides = (1..parts.len().max(2)).map(|i| launcher.aside(i - 1)).collect::<Result<Vec<_>, _>>()?;
        let streams = || iter::once(launcher).chain(asides.iter().map(Aside::launcher));
        let shares: Vec<Share> = parts.into_iter().zip(streams()).map(|(part, launcher)| part.by(launcher)).collect();
        let of_tail = self.call.by(if shares.len() == 1 { asides[0].launcher() } else { launcher }.clone());
        let begins_with_tail = shares.len() == 1 && self.call.shape.q_offset() == 0;
        if begins_with_tail {
            self.attend_tail(&of_tail)?;
        }
        for (i, share) in shares.iter().enumerate() {
            self.enqueue(share, self.kernel(first_pass.0), group, first_pass)?;
            if i == 0 && !begins_with_tail {
                self.attend_tail(&of_tail)?;
            }
        }
        if let Some(probes) = &self.probes {
            for share in &shares {
                let parts = self.parts(share)?;
                probes.attend(parts, &self.whole)?;
                probes.measure(parts, &self.whole, UnitList::ALL, 0)?;
                probes.correct(parts, &self.whole)?;
            }
        }
        asides.into_iter().try_for_each(Aside::join)
    }

    fn attend_tail(&self, call: &Call) -> Result<(), CudaError> {
        let first_row = self.plan.ranked_rows();
        if first_row < call.shape.q_len() { tail::launch(call, first_row) } else { Ok(()) }
    }

    /// Corrects the rows of a group by its probes and measures their error. The heads and segments above the bound are
    /// computed again. The host does not wait: their lists are made on the device.
    fn keep_bound(&self, probes: &Probes, group: &SegmentGroup, control: &ErrorControl) -> Result<(), CudaError> {
        let whole = Share::whole(self.call);
        let parts = self.parts(&whole)?;
        probes.attend(parts, group)?;
        for pass in 0..ErrorControl::PASSES {
            let units = probes.units(parts, group, pass)?;
            if pass > 0 {
                let of_pass = (control.config(pass), units);
                if self.permuted.is_some() {
                    self.enqueue(&whole, Kernel::Pass1, group, of_pass)?;
                }
                self.enqueue(&whole, self.kernel(of_pass.0), group, of_pass)?;
            }
            probes.measure(parts, group, units, pass)?;
        }
        probes.correct(parts, group)
    }

    fn parts<'b>(&'b self, share: &'b Share) -> Result<Parts<'b>, CudaError> {
        let Self { plan, ref scratch, ref counters, counts, .. } = *self;
        Ok(Parts { share, plan, scratch, counters, counts, memory: self.memory()? })
    }

    /// The memory of the statistics, allocated at the first call.
    fn memory(&self) -> Result<&Scratch, CudaError> {
        if let Some(memory) = self.memory.get() {
            return Ok(memory);
        }
        let memory = self.call.allocate(&self.kept)?;
        Ok(self.memory.get_or_init(|| memory))
    }

    /// Enqueues the kernels or copies that write the orders of a group, and the estimates for its probes, to scratch memory.
    fn order(&self, group: &SegmentGroup) -> Result<(), CudaError> {
        let Self { call, config, plan, scratch, .. } = self;
        if let Some(ranking) = self.given {
            self.upload_kv_perm(group, ranking)?;
        }
        let Some(ranker) = &self.ranker else { return Ok(()) };
        let orders = Orders {
            kv_perm: scratch.at(self.kv_perm),
            q_perm: self.permuted.map(|(q_perm, _)| scratch.at(q_perm)),
            prefix_score: self.probes.as_ref().map(|probes| probes.prefix_score(scratch)),
            arrivals: self.counters.arrivals(scratch),
            zeroed: if self.is_ranked_first && group.end == self.whole.end { self.counters.len() } else { 0 },
        };
        ranker.rank(call, scratch, config, plan, group, orders)
    }

    /// Ranks the groups one after the other, and reads their orders.
    fn rank_only(&self) -> Result<Ranking, AttnError> {
        let Self { call, plan, scratch, .. } = self;
        let shape = &call.shape;
        // Segments entirely in the dense tail need no order and get the natural order.
        let natural = |segment: &Segment| SegmentOrder {
            q_perm: Permutation::identity(segment.rows.len()),
            kv_perm: Permutation::identity(segment.start),
        };
        let mut ranking =
            vec![plan.segments.iter().map(natural).collect::<Vec<_>>(); shape.batch() * shape.num_heads()];
        for group in &self.groups {
            self.order(group)?;
            let tokens = scratch.download(self.kv_perm)?;
            let rows = match self.permuted {
                Some((q_perm, _)) => scratch.download(q_perm)?,
                None => Vec::new(),
            };
            for (head, orders) in ranking.iter_mut().enumerate() {
                let mut place = head * group.keys;
                for (segment, order) in plan.segments.iter().zip(orders).take(group.end).skip(group.first) {
                    order.kv_perm = permutation(&tokens[place..place + segment.start], 0)?;
                    place += segment.start;
                    if self.permuted.is_some() {
                        let rows = &rows[head * shape.q_len()..][segment.rows.clone()];
                        order.q_perm = permutation(rows, segment.rows.start)?;
                    }
                }
            }
        }
        Ok(ranking)
    }

    /// The kernel that computes the prefixes.
    fn kernel(&self, config: &S2oConfig) -> Kernel {
        let keeps = config.triggering_tile() == TriggeringTile::Keep;
        match config.stop_rule() {
            _ if config.q_perm() => Kernel::Pass2,
            _ if config.tau().resolve(self.plan.prompt_len) == 0.0 => Kernel::SinglePassFull,
            StopRule::MaxWeight | StopRule::MeanWeight if keeps => Kernel::SinglePassWeights,
            StopRule::Auto | StopRule::AllRows if keeps && config.gain_frame() == GainFrame::NewMax => {
                Kernel::SinglePass
            }
            _ => Kernel::SinglePassExact,
        }
    }

    /// Enqueues a sparse kernel on the units of a share and group, all or those of a list, with the settings of a pass. A list
    /// is of the whole call.
    fn enqueue(
        &self,
        share: &Share,
        kernel: Kernel,
        group: &SegmentGroup,
        (config, units): (&S2oConfig, UnitList),
    ) -> Result<(), CudaError> {
        let Self { plan, scratch, .. } = self;
        let call = &share.call;
        let heads = call.shape.batch() * call.shape.num_heads();
        let segments = group.len();
        let attn = call.params(Mask::Causal, self.counters.next_item(scratch))?;
        let parts = self.parts(share)?;
        let [lse, out_norm] = self.probes.as_ref().map_or([ptr::null_mut(); 2], |probes| probes.row_results(parts));
        let rows_before = share.heads_before * call.shape.q_len();
        let params = S2oParams {
            attn: AttnParams { lse, ..attn },
            kv_perm: scratch.at(self.kv_perm).wrapping_add(share.heads_before * group.keys),
            kv_perm_head_stride: group.keys as i64,
            q_perm: self
                .permuted
                .map_or(ptr::null(), |(q_perm, _)| scratch.at(q_perm).wrapping_add(rows_before).cast_const()),
            state: self.permuted.map_or(ptr::null_mut(), |(_, state)| scratch.at(state).wrapping_add(rows_before)),
            tiles_visited: self.counts.tiles_visited_of(parts.memory, plan, share.heads_before),
            out_norm,
            units,
            segment_len: to_i32("segment_len", plan.segment_len)?,
            first_segment: to_i32("segments", plan.segments[group.first].index)?,
            num_segments: to_i32("segments", segments)?,
            ranked_rows: to_i32("q_len", plan.ranked_rows())?,
            tau: config.tau().resolve(plan.prompt_len),
            stop_rule: match config.stop_rule() {
                StopRule::Auto | StopRule::AllRows => 0,
                StopRule::MeanRatio => 1,
                StopRule::SumRatio => 2,
                StopRule::MaxWeight => 3,
                StopRule::MeanWeight => 4,
            },
            literal_frame: i32::from(config.gain_frame() == GainFrame::Literal),
            discard: i32::from(config.triggering_tile() == TriggeringTile::Discard),
        };
        let items = segments * (plan.segment_len / TILE_Q) * heads;
        // SAFETY: these kernels take S2oParams. Orders, states and counts have room for every head, segment and row,
        // and the scratch memory is released on this stream after the launch.
        unsafe { call.launch(kernel, &params, Grid::Persistent { items }) }
    }

    fn upload_kv_perm(&self, group: &SegmentGroup, ranking: &Ranking) -> Result<(), CudaError> {
        let orders = ranking.iter().flat_map(|orders| &orders[group.first..group.end]);
        let tokens: Vec<i32> = orders.flat_map(|order| order.kv_perm.as_slice()).map(|&token| token as i32).collect();
        self.scratch.upload(self.kv_perm, &tokens)
    }

    fn upload_q_perm(&self, region: Region<i32>, ranking: &Ranking) -> Result<(), CudaError> {
        let q_len = self.call.shape.q_len();
        let mut rows = vec![0; region.len];
        for (orders, rows) in ranking.iter().zip(rows.chunks_exact_mut(q_len)) {
            for (segment, order) in self.plan.segments.iter().zip(orders) {
                for (row, &from) in rows[segment.rows.clone()].iter_mut().zip(order.q_perm.as_slice()) {
                    *row = (segment.rows.start + from as usize) as i32;
                }
            }
        }
        self.scratch.upload(region, &rows)
    }
}

/// The GPU's permutation, with indices counted from `base`. An invalid permutation is an error, not a panic.
fn permutation(indices: &[i32], base: usize) -> Result<Permutation, S2oError> {
    Ok(Permutation::new(indices.iter().map(|&index| (index as u32).wrapping_sub(base as u32)).collect())?)
}
