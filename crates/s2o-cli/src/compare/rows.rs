//! Runs of the methods on one layer, and their rows.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_s2o::{Attention, Dense, HeadWork, Mask, dense_attn};
use comfy_table::{Cell, Table};
use s2o_eval::capture::LayerTensors;
use s2o_eval::method::{Method, total};
use s2o_eval::metrics::{ErrorSums, Errors};
use serde::Serialize;

use crate::layout::{Look, scientific, seconds};

/// Value of the column `head` for all heads together.
const ALL_HEADS: i64 = -1;

/// One method on one head of one layer, or on all heads.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub method: String,
    pub layer: usize,
    pub head: i64,
    density: f64,
    mse: f64,
    mae: f64,
    pub rel_l1: f64,
    rel_l2: f64,
    cosine: f64,
    /// Relative L2 error that S2O's probes measured, and its interval.
    measured: Option<f64>,
    measured_low: Option<f64>,
    measured_high: Option<f64>,
    /// Time of the whole call, also in the rows of single heads.
    pub seconds: f64,
}

impl Row {
    pub fn is_total(&self) -> bool {
        self.head == ALL_HEADS
    }
}

/// A method and its name in the rows.
#[derive(Debug)]
pub struct Contender {
    pub name: String,
    pub method: Box<dyn Method>,
}

impl From<Box<dyn Method>> for Contender {
    fn from(method: Box<dyn Method>) -> Self {
        Self { name: method.name().to_owned(), method }
    }
}

struct Measured {
    output: Tensor,
    /// Work of each head, in all sequences of the batch.
    work: Vec<HeadWork>,
    seconds: f64,
}

/// Runs `methods` on a layer, each `repeat` times, and compares them with `reference`. `keep` gets the outputs.
pub fn compare(
    layer: &LayerTensors,
    methods: &[Contender],
    reference: &Contender,
    repeat: usize,
    keep: &mut dyn FnMut(&str, Tensor),
) -> Result<Vec<Row>> {
    // The time for starting the threads must not count for any method.
    let few = layer.q.dim(1)?.min(layer.k.dim(1)?).min(layer.v.dim(1)?).min(128);
    let first = |t: &Tensor| t.narrow(1, 0, few);
    dense_attn(&first(&layer.q)?, &first(&layer.k)?, &first(&layer.v)?, layer.softmax_scale, Mask::Causal)?;
    let exact = measure(reference.method.as_ref(), layer, repeat)?;
    let mut rows = Vec::new();
    for Contender { name, method } in methods {
        let again;
        // The reference has already run.
        let measured = if *name == reference.name {
            &exact
        } else {
            again = measure(method.as_ref(), layer, repeat)?;
            &again
        };
        let heads = ErrorSums::by_head(&exact.output, &measured.output)?;
        let sums_of_all: ErrorSums = heads.iter().copied().sum();
        let row = |head, work: &HeadWork, sums: &ErrorSums| {
            let Errors { mse, mae, rel_l1, rel_l2, cosine } = sums.errors();
            let interval = work.probes.map(|probes| probes.interval());
            Row {
                method: name.clone(),
                layer: layer.layer,
                head,
                density: work.density(),
                mse,
                mae,
                rel_l1,
                rel_l2,
                cosine,
                measured: work.probes.map(|probes| probes.relative_error()),
                measured_low: interval.map(|(low, _)| low),
                measured_high: interval.map(|(_, high)| high),
                seconds: measured.seconds,
            }
        };
        rows.push(row(ALL_HEADS, &total(&measured.work), &sums_of_all));
        for (head, (sums, work)) in heads.iter().zip(&measured.work).enumerate() {
            rows.push(row(head as i64, work, sums));
        }
        keep(name, measured.output.clone());
    }
    Ok(rows)
}

fn measure(method: &dyn Method, layer: &LayerTensors, repeat: usize) -> Result<Measured> {
    let LayerTensors { q, k, v, .. } = layer;
    let call = layer.call()?;
    if !q.device().is_cpu() {
        // The first call on a GPU loads the kernels.
        method.prefill(&call, q, k, v)?.device().synchronize()?;
    }
    let mut times = Vec::with_capacity(repeat);
    let mut last = None;
    for _ in 0..repeat {
        // Keeps one output at a time: at 128K tokens each takes gigabytes.
        drop(last.take());
        let start = Instant::now();
        let output = method.prefill(&call, q, k, v)?;
        output.device().synchronize()?;
        times.push(start.elapsed().as_secs_f64());
        let work: Vec<HeadWork> = method.take_work()?.into_values().flatten().collect();
        last = Some((output, work));
    }
    times.sort_by(f64::total_cmp);
    let (output, work) = last.expect("at least one repeat");
    let num_heads = output.dim(2)?;
    let work = match work.as_slice() {
        // The method is always dense.
        [] => vec![HeadWork::of_tiles(1.0, 1); num_heads],
        work => (0..num_heads).map(|head| total(work.iter().skip(head).step_by(num_heads))).collect(),
    };
    Ok(Measured { output, work, seconds: times[times.len() / 2] })
}

/// The rows as a table, without the single heads of exact dense attention. If there are probes, the error that they
/// measured stands beside the true one.
pub fn table(rows: &[Row], look: Look) -> Table {
    let are_measured = rows.iter().any(|row| row.measured.is_some());
    let measured = are_measured.then_some(["relative L2", "measured", "95 % interval"]);
    let header = ["layer", "method", "head", "density", "MSE", "MAE", "relative L1"];
    let header = header.into_iter().chain(measured.into_iter().flatten()).chain(["cosine", "time"]);
    let mut table = look.table(header.collect::<Vec<_>>());
    for row in
        rows.iter().filter(|row| row.is_total() || row.density < 1.0 || (row.mse > 0.0 && row.method != Dense.name()))
    {
        let is_total = row.is_total();
        let mut cells = vec![
            Cell::new(row.layer),
            Cell::new(&row.method),
            Cell::new(if is_total { "all".to_owned() } else { row.head.to_string() }),
            Cell::new(format!("{:.3}", row.density)),
            Cell::new(scientific(row.mse)),
            Cell::new(scientific(row.mae)),
            Cell::new(scientific(row.rel_l1)),
        ];
        if are_measured {
            let interval = row.measured_low.zip(row.measured_high);
            let interval = interval.map(|(low, high)| format!("{} to {}", scientific(low), scientific(high)));
            cells.push(Cell::new(scientific(row.rel_l2)));
            cells.push(Cell::new(row.measured.map(scientific).unwrap_or_default()));
            cells.push(Cell::new(interval.unwrap_or_default()));
        }
        cells.push(Cell::new(format!("{:.6}", row.cosine)));
        cells.push(Cell::new(if is_total { seconds(row.seconds) } else { String::new() }));
        table.add_row(cells);
    }
    table
}

/// Largest relative L1 difference of two exact implementations: they round 16-bit outputs and weights differently.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 1e-5,
    }
}

/// The verdict of a comparison with another exact attention: a line for each method that was compared with `reference`.
pub fn verdict(rows: &[Row], reference: &str, dtype: DType) -> Vec<String> {
    let mut methods: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.method != reference) {
        if !methods.contains(&row.method.as_str()) {
            methods.push(&row.method);
        }
    }
    let seconds = |method: &str| -> f64 {
        rows.iter().filter(|row| row.is_total() && row.method == method).map(|row| row.seconds).sum()
    };
    let by_error = |a: &&Row, b: &&Row| a.rel_l1.total_cmp(&b.rel_l1);
    let line = |method: &str| {
        let own = || rows.iter().filter(|row| row.method == method);
        let total = own().filter(|row| row.is_total()).max_by(by_error)?;
        let head = own().filter(|row| !row.is_total()).max_by(by_error)?;
        let (error, within) = (total.rel_l1, rounding(dtype));
        let relation = if error <= within {
            format!(
                "agrees with {reference} to {error:.1e} relative L1, within {} rounding ({within:.1e})",
                dtype.as_str()
            )
        } else {
            format!("differs from {reference} by {error:.1e} relative L1")
        };
        let worst = format!("most in layer {} head {} ({:.1e})", head.layer, head.head, head.rel_l1);
        Some(format!("{method} {relation}, {worst}; it is {:.2}x as fast", seconds(reference) / seconds(method)))
    };
    methods.into_iter().filter_map(line).collect()
}
