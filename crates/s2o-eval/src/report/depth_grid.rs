//! [`DepthGrid`]: scores by the depth of the requested fact and the length of the prompt.

use super::aggregate::grouped;
use crate::run::{Key, Outcome, Setting};

/// Mean scores of one task and method by depth and length, as in needle-in-a-haystack pictures.
#[derive(Debug, Clone, PartialEq)]
pub struct DepthGrid {
    /// The task.
    pub task: String,
    /// The method as requested.
    pub method: String,
    /// Model, template and chunk.
    pub setting: Setting,
    /// Lengths in tokens, ascending; the columns.
    pub lengths: Vec<usize>,
    /// Depths from 0 to 1, ascending; the rows.
    pub depths: Vec<f64>,
    /// Scores by depth, then length; `None` where nothing was run.
    pub scores: Vec<Vec<Option<f64>>>,
}

impl DepthGrid {
    /// Whether there is a score for every depth and length.
    pub fn is_full(&self) -> bool {
        self.scores.iter().flatten().all(Option::is_some)
    }
}

/// The grids of all tasks whose outcomes have a depth, in the order of their first occurrence.
pub fn depth_grids(outcomes: &[Outcome]) -> Vec<DepthGrid> {
    let placed = outcomes.iter().filter(|outcome| outcome.depth.is_some() && outcome.score().is_some());
    let grids = grouped(placed, |outcome| (&outcome.task, &outcome.key.method, &outcome.key.setting));
    grids.iter().map(|outcomes| grid(outcomes)).collect()
}

fn grid(outcomes: &[&Outcome]) -> DepthGrid {
    let Key { method, setting, .. } = &outcomes[0].key;
    let cell = |outcome: &&Outcome| Some((outcome.context_tokens, outcome.depth?, outcome.score()?));
    let cells: Vec<(usize, f64, f64)> = outcomes.iter().filter_map(cell).collect();
    let mut lengths: Vec<usize> = cells.iter().map(|cell| cell.0).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut depths: Vec<f64> = cells.iter().map(|cell| cell.1).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let mean = |length: usize, depth: f64| {
        let of_place = cells.iter().filter(|cell| (cell.0, cell.1) == (length, depth));
        let (sum, count) = of_place.fold((0.0, 0), |(sum, count), cell| (sum + cell.2, count + 1));
        (count > 0).then(|| sum / f64::from(count))
    };
    let scores = depths.iter().map(|&depth| lengths.iter().map(|&length| mean(length, depth)).collect()).collect();
    DepthGrid {
        task: outcomes[0].task.clone(),
        method: method.clone(),
        setting: setting.clone(),
        lengths,
        depths,
        scores,
    }
}
