//! A query tile with its running softmax, and the buffers of a worker. The tile loops reuse these buffers.

use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;
use std::ops::Range;

use super::microkernel;
use super::softmax::{Columns, LANES, cap, exponentiate, rescale_columns};
use super::strided::{Element, Inputs};
use crate::config::GainFrame;
use crate::early_stop::{Gain, StopVote};
use crate::online_softmax::RowUpdate;

/// One query tile of one head: its rows, its scaled queries and its state.
#[derive(Debug, Default)]
pub(super) struct QueryTile {
    /// Rows of the call, in the order of the tile.
    pub(super) rows: Vec<usize>,
    /// `rows.len()` rounded up to [`LANES`]. The queries of the extra lanes are zero.
    lanes: usize,
    /// (head_dim, lanes), times `softmax_scale * log2 e`, so that scores are in units of log2.
    q: Vec<f32>,
    /// Cap of the scores, in units of log2.
    softcap: Option<f32>,
    /// (head_dim, lanes)
    acc: Vec<f32>,
    /// (lanes), in units of log2
    row_max: Vec<f32>,
    /// (lanes)
    row_sum: Vec<f32>,
    /// Whether the tile skipped keys.
    pub(super) skips: bool,
}

impl QueryTile {
    fn head_dim(&self) -> usize {
        self.q.len() / self.lanes
    }

    fn reset(&mut self, rows: impl Iterator<Item = usize>, head_dim: usize) {
        self.rows.clear();
        self.rows.extend(rows);
        self.skips = false;
        self.lanes = self.rows.len().next_multiple_of(LANES);
        for (column, len, value) in [
            (&mut self.q, head_dim * self.lanes, 0.0),
            (&mut self.acc, head_dim * self.lanes, 0.0),
            (&mut self.row_max, self.lanes, f32::NEG_INFINITY),
            (&mut self.row_sum, self.lanes, 0.0),
        ] {
            column.clear();
            column.resize(len, value);
        }
    }

    pub(super) fn last_row(&self) -> usize {
        self.rows[self.rows.len() - 1]
    }

    /// Initialises the tile with `rows` and no keys.
    pub(super) fn load<T: Element>(
        &mut self,
        inputs: &Inputs<'_, T>,
        (batch, head): (usize, usize),
        rows: impl Iterator<Item = usize>,
        row_buffer: &mut [f32],
    ) {
        let head_dim = inputs.shape.head_dim();
        self.reset(rows, head_dim);
        let scale = inputs.scale.softmax_scale * LOG2_E;
        self.softcap = inputs.scale.softcap.map(|cap| cap * LOG2_E);
        // Transposes LANES rows at a time, to use whole cache lines on both sides.
        for (rows, lane) in self.rows.chunks(LANES).zip((0..self.lanes).step_by(LANES)) {
            let queries = inputs.q.gather((batch, head), rows.iter().copied(), row_buffer);
            for (d, column) in self.q.chunks_exact_mut(self.lanes).enumerate() {
                for (i, x) in column[lane..lane + rows.len()].iter_mut().enumerate() {
                    *x = queries[i * head_dim + d] * scale;
                }
            }
        }
    }

    /// Initialises the tile with `len` rows of other tiles and their states. Row `i` comes from `sources(i)`, a tile
    /// and its lane.
    pub(super) fn resume<'t>(&mut self, len: usize, sources: impl Fn(usize) -> (&'t QueryTile, usize)) {
        let head_dim = sources(0).0.head_dim();
        self.reset((0..len).map(&sources).map(|(tile, lane)| tile.rows[lane]), head_dim);
        self.softcap = sources(0).0.softcap;
        for i in 0..len {
            let (from, lane) = sources(i);
            for d in 0..head_dim {
                self.q[d * self.lanes + i] = from.q[d * from.lanes + lane];
                self.acc[d * self.lanes + i] = from.acc[d * from.lanes + lane];
            }
            self.row_max[i] = from.row_max[lane];
            self.row_sum[i] = from.row_sum[lane];
        }
    }

    /// Scores a key tile and turns the scores into weights relative to the new maxima in `columns`. With `first_row`,
    /// the rows ascend, and row `first_row + t` is the first that sees key `t`.
    pub(super) fn score(&self, keys: &[f32], first_row: Option<isize>, scores: &mut Scores) {
        let head_dim = self.head_dim();
        let n = keys.len() / head_dim;
        scores.weights.resize(n * self.lanes, 0.0);
        microkernel::scores(self.lanes, head_dim, &self.q, keys, &mut scores.weights);
        if let Some(softcap) = self.softcap {
            cap(&mut scores.weights, softcap);
        }
        if let Some(first_row) = first_row {
            for (first_row, column) in (first_row..).zip(scores.weights.chunks_exact_mut(self.lanes)) {
                let blind = self.rows.partition_point(|&row| (row as isize) < first_row);
                column[..blind].fill(f32::NEG_INFINITY);
            }
        }
        exponentiate(&mut scores.weights, &self.row_max, &mut scores.columns);
    }

    /// Adds the rows' gains to a vote on whether to stop.
    pub(super) fn vote(&self, scores: &Scores, frame: GainFrame, vote: &mut StopVote) {
        let columns = &scores.columns;
        for i in 0..self.rows.len() {
            let update = RowUpdate {
                new_max: f64::from(columns.new_max[i]),
                rescale: f64::from(columns.rescale[i]),
                old_sum: f64::from(self.row_sum[i]),
                tile_sum: f64::from(columns.tile_sum[i]),
                largest: f64::from(columns.largest[i]),
            };
            vote.add(Gain::of(&update, frame));
        }
    }

    /// Zeroes the weights of 32 consecutive rows if the largest score of each row, relative to its maximum so far, is
    /// below `threshold` (in nats). The sums of the rows still include the tile. Returns the number of such rows.
    pub(super) fn skip_values(&self, scores: &mut Scores, threshold: f32) -> usize {
        const STRIP: usize = 32;
        let least = threshold.exp();
        let mut skipped = 0;
        for start in (0..self.rows.len()).step_by(STRIP) {
            // Without the extra lanes, whose scores are 0.
            let strip = start..(start + STRIP).min(self.rows.len());
            let columns = scores.weights.chunks_exact_mut(self.lanes);
            if columns.map(|column| &column[strip.clone()]).all(|column| column.iter().all(|&weight| weight < least)) {
                scores.weights.chunks_exact_mut(self.lanes).for_each(|column| column[strip.clone()].fill(0.0));
                skipped += strip.len();
            }
        }
        skipped
    }

    /// Adds a scored key tile to the state.
    pub(super) fn update(&mut self, scores: &Scores, values: &[f32]) {
        let columns = &scores.columns;
        for ((sum, &rescale), &tile_sum) in self.row_sum.iter_mut().zip(&columns.rescale).zip(&columns.tile_sum) {
            *sum = *sum * rescale + tile_sum;
        }
        self.row_max.copy_from_slice(&columns.new_max);
        rescale_columns(&mut self.acc, &columns.rescale);
        let head_dim = self.head_dim();
        microkernel::accumulate(self.lanes, head_dim, &scores.weights, values, &mut self.acc);
    }

    /// Natural logarithm of the sum of `exp(score)` of the row in a lane.
    pub(super) fn log_sum_exp(&self, lane: usize) -> f64 {
        f64::from(self.row_max[lane]) * LN_2 + f64::from(self.row_sum[lane]).ln()
    }

    /// Calls `take` with the lane and the output `acc / l` of each row.
    pub(super) fn finish(&self, row_buffer: &mut [f32], mut take: impl FnMut(usize, &[f32])) {
        let head_dim = self.head_dim();
        for (first, rows) in (0..).step_by(LANES).zip(self.rows.chunks(LANES)) {
            for (d, column) in self.acc.chunks_exact(self.lanes).enumerate() {
                for (i, &x) in column[first..first + rows.len()].iter().enumerate() {
                    row_buffer[i * head_dim + d] = x / self.row_sum[first + i];
                }
            }
            (first..first + rows.len()).zip(row_buffer.chunks_exact(head_dim)).for_each(|(lane, out)| take(lane, out));
        }
    }
}

/// Scores of one query tile and one key tile.
#[derive(Debug, Default)]
pub(super) struct Scores {
    weights: Vec<f32>,
    columns: Columns,
}

/// The buffers of one worker.
#[derive(Debug)]
pub(super) struct Workspace {
    /// The query tiles of the run, then unused tiles of longer runs.
    pub(super) tiles: Vec<QueryTile>,
    /// Buffer for regrouped tiles.
    pub(super) permuted: Vec<QueryTile>,
    pub(super) scores: Scores,
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
    /// (LANES, head_dim): rows to be transposed into or out of a tile.
    pub(super) rows: Vec<f32>,
}

impl Workspace {
    /// The workspace of a worker, created with its first item, because rayon prepares more workers than it may need.
    /// Workers take items one at a time, the longest first, so that none starts a long item at the end.
    pub(super) fn held(held: &mut Option<Self>, head_dim: usize, tile_k: usize) -> &mut Self {
        held.get_or_insert_with(|| Self::new(head_dim, tile_k))
    }

    pub(super) fn new(head_dim: usize, tile_k: usize) -> Self {
        Self {
            tiles: Vec::new(),
            permuted: Vec::new(),
            scores: Scores::default(),
            keys: vec![0.0; tile_k * head_dim],
            values: vec![0.0; tile_k * head_dim],
            rows: vec![0.0; LANES * head_dim],
        }
    }

    /// Loads the queries `rows` of a head, a query tile for each range.
    pub(super) fn load<T: Element>(&mut self, inputs: &Inputs<'_, T>, at: (usize, usize), rows: &[Range<usize>]) {
        for (tile, rows) in Self::at_least(&mut self.tiles, rows.len()).iter_mut().zip(rows) {
            tile.load(inputs, at, rows.clone(), &mut self.rows);
        }
    }

    /// The first `count` tiles of `tiles`, created if missing.
    pub(super) fn at_least(tiles: &mut Vec<QueryTile>, count: usize) -> &mut [QueryTile] {
        if tiles.len() < count {
            tiles.resize_with(count, QueryTile::default);
        }
        &mut tiles[..count]
    }
}
