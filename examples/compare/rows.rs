//! Running the methods on one layer, and the rows that come of it.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_s2o::{Attention, Dense, PrefillCall, dense_attn};
use comfy_table::{Cell, Table};
use serde::Serialize;

use crate::cli::errors::{ErrorSums, Errors};
use crate::cli::layout::{Look, seconds};
use crate::methods::{Density, Method};
use crate::tensors::LayerTensors;

/// Query positions that are converted to f32 at a time.
const POSITIONS: usize = 2048;
/// In the column `head`: over all heads.
const ALL_HEADS: i64 = -1;

/// One method on one head of one layer, or on all heads.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub method: String,
    pub layer: usize,
    /// -1: all.
    pub head: i64,
    density: f64,
    mse: f64,
    mae: f64,
    pub rel_l1: f64,
    cosine: f64,
    /// Of the whole call, in the rows of heads too.
    pub seconds: f64,
}

impl Row {
    /// Whether it is about all heads together.
    pub fn is_total(&self) -> bool {
        self.head == ALL_HEADS
    }
}

/// What one method made of a layer.
struct Measured {
    output: Tensor,
    density: Density,
    seconds: f64,
}

/// Runs `methods` on a layer, each `repeat` times, and compares with `reference`. `keep` gets each method's output.
pub fn compare(
    layer: &LayerTensors,
    methods: &[Box<dyn Method>],
    reference: &dyn Method,
    repeat: usize,
    keep: &mut dyn FnMut(&str, Tensor),
) -> Result<Vec<Row>> {
    // Starting the threads is nobody's time.
    let few = layer.q.dim(1)?.min(128);
    let first = |t: &Tensor| t.narrow(1, 0, few);
    dense_attn(&first(&layer.q)?, &first(&layer.k)?, &first(&layer.v)?, layer.softmax_scale, true)?;
    let exact = measure(reference, layer, repeat)?;
    let mut rows = Vec::new();
    for method in methods {
        let again;
        // What the others are compared with has run already.
        let measured = if method.name() == reference.name() {
            &exact
        } else {
            again = measure(method.as_ref(), layer, repeat)?;
            &again
        };
        let heads = sums_by_head(&exact.output, &measured.output)?;
        let mut total = ErrorSums::default();
        heads.iter().for_each(|head| total += *head);
        let row = |head, density, sums: &ErrorSums| {
            let Errors { mse, mae, rel_l1, cosine } = sums.errors();
            let (method, layer, seconds) = (method.name().to_owned(), layer.layer, measured.seconds);
            Row { method, layer, head, density, mse, mae, rel_l1, cosine, seconds }
        };
        rows.push(row(ALL_HEADS, measured.density.total, &total));
        for (head, (sums, density)) in heads.iter().zip(&measured.density.heads).enumerate() {
            rows.push(row(head as i64, *density, sums));
        }
        keep(method.name(), measured.output.clone());
    }
    Ok(rows)
}

fn measure(method: &dyn Method, layer: &LayerTensors, repeat: usize) -> Result<Measured> {
    let LayerTensors { q, k, v, .. } = layer;
    let call = PrefillCall {
        layer: layer.layer,
        softmax_scale: layer.softmax_scale,
        prompt_len: k.dims().get(1).copied().unwrap_or_default(),
    };
    if !q.device().is_cpu() {
        // The first call on a GPU loads its kernels.
        method.prefill(&call, q, k, v)?.device().synchronize()?;
    }
    let mut times = Vec::with_capacity(repeat);
    let mut last = None;
    for _ in 0..repeat {
        // One output at a time: at 128K tokens each is gigabytes.
        drop(last.take());
        let start = Instant::now();
        let output = method.prefill(&call, q, k, v)?;
        output.device().synchronize()?;
        times.push(start.elapsed().as_secs_f64());
        let density = method.take_density(output.dim(2)?);
        last = Some((output, density));
    }
    times.sort_by(f64::total_cmp);
    let (output, density) = last.expect("at least one repeat");
    Ok(Measured { output, density, seconds: times[times.len() / 2] })
}

/// Sums over outputs (batch, length, heads, head_dim), by head.
fn sums_by_head(exact: &Tensor, other: &Tensor) -> Result<Vec<ErrorSums>> {
    let (_, len, num_heads, head_dim) = exact.dims4()?;
    let mut heads = vec![ErrorSums::default(); num_heads];
    for start in (0..len).step_by(POSITIONS) {
        let [exact, other] = [exact, other].map(|tensor| {
            let part = tensor.narrow(1, start, POSITIONS.min(len - start))?;
            part.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()
        });
        let (exact, other) = (exact?, other?);
        for (i, (exact, other)) in exact.chunks_exact(head_dim).zip(other.chunks_exact(head_dim)).enumerate() {
            heads[i % num_heads] += ErrorSums::of(exact, other);
        }
    }
    Ok(heads)
}

/// The rows for people; dense has nothing to say about single heads.
pub fn table(rows: &[Row], look: Look) -> Table {
    let header = ["layer", "method", "head", "density", "MSE", "MAE", "relative L1", "cosine", "time"];
    let mut table = look.table(header);
    for row in
        rows.iter().filter(|row| row.is_total() || row.density < 1.0 || (row.mse > 0.0 && row.method != Dense.name()))
    {
        let is_total = row.is_total();
        table.add_row(vec![
            Cell::new(row.layer),
            Cell::new(&row.method),
            Cell::new(if is_total { "all".to_owned() } else { row.head.to_string() }),
            Cell::new(format!("{:.3}", row.density)),
            Cell::new(scientific(row.mse)),
            Cell::new(scientific(row.mae)),
            Cell::new(scientific(row.rel_l1)),
            Cell::new(format!("{:.6}", row.cosine)),
            Cell::new(if is_total { seconds(row.seconds) } else { String::new() }),
        ]);
    }
    table
}

fn scientific(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:.2e}") }
}
