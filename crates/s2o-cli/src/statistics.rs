//! `s2o statistics`: softmax mass of the sink, of the local window and of the strongest other keys, and S2O's density,
//! by layer or by head. The calibration of the synthetic weights (docs/synthetic.md) is made and checked with this
//! command.

use std::num::NonZeroUsize;
use std::ops::AddAssign;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_s2o::{Attention, PrefillCall, S2o};
use clap::Args;

use crate::layout::Look;
use crate::model_flags::ModelFlags;
use crate::prompt_flags::PromptFlags;
use crate::s2o_flags::S2oFlags;
use crate::{exit, machine, model_flags};

/// Number of keys at the start that count as the sink: the first key tile.
const SINK: usize = 128;
/// Number of keys before a query that count as local: the paper's segment.
const LOCAL: usize = 2048;
/// The shares of the remaining keys whose mass is summed.
const TOP: [f64; 3] = [0.01, 0.05, 0.1];

/// Measure a model's attention: softmax mass of sampled queries, and S2O's density
#[derive(Debug, Args)]
pub struct Flags {
    /// Queries to sample, spread over the second half of the prompt
    #[arg(long, value_name = "N", default_value = "32")]
    queries: NonZeroUsize,
    /// Print a row for each head instead of each layer
    #[arg(long)]
    heads: bool,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    prompt: PromptFlags,
    #[command(flatten)]
    s2o: S2oFlags,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        let s2o = self.s2o.attention()?;
        let prompt = self.prompt.read(&self.model)?;
        let model = self.model.load()?;
        let prompt = prompt.encode(&model)?;
        let (len, queries) = (prompt.tokens.len(), self.queries.get());
        let positions = (1..=queries).map(|i| len / 2 + i * (len - len / 2) / queries - 1).collect();
        let config = model.config();
        let heads = vec![vec![Mass::default(); config.num_heads]; config.num_layers];
        let observer = Observer { s2o, positions, heads: Mutex::new(heads) };
        self.model.prefill("observing", &model, &prompt.tokens, &observer)?;

        let stats = observer.s2o.take_stats()?;
        let heads = observer.heads.into_inner().unwrap_or_else(PoisonError::into_inner);
        let header = ["", "density", "by head", "visited", "sink", "local", "rest", "top 1 %", "top 5 %", "top 10 %"];
        let mut table = Look::of_stdout().table(header);
        let mut all = Vec::new();
        for (layer, masses) in heads.iter().enumerate() {
            let tiles = stats.get(&layer).map_or(&[][..], |stats| &stats.heads);
            let row = |(head, &mass): (usize, &Mass)| Row {
                density: tiles.get(head).map_or(1.0, |tiles| tiles.density()),
                visited: tiles.get(head).map_or(f64::NAN, |tiles| tiles.mean_visited()),
                mass,
            };
            let rows: Vec<Row> = masses.iter().enumerate().map(row).collect();
            if self.heads {
                for (head, row) in rows.iter().enumerate() {
                    table.add_row(cells(format!("layer {layer} head {head}"), std::slice::from_ref(row)));
                }
            } else {
                table.add_row(cells(format!("layer {layer}"), &rows));
            }
            all.extend(rows);
        }
        table.add_row(cells("all".to_owned(), &all));
        exit::print(&format!(
            "model   {}\nprompt  {}\n\n{table}\n\n\
             density and visited: of S2O, key tiles computed of all causal ones, and prefix tiles for a query tile.\n\
             by head: the lowest, middle and highest density. sink: softmax mass of the first {SINK} keys; local:\n\
             of the last {LOCAL}; rest: of the keys between, and the part of it that its strongest keys hold.\n\
             Means over {queries} queries of the second half and over heads.\n\n{}\n",
            model_flags::describe(&model),
            prompt.description,
            machine::describe(model.decoder.device()),
        ))
    }
}

#[derive(Debug, Clone, Copy)]
struct Row {
    density: f64,
    visited: f64,
    mass: Mass,
}

fn cells(name: String, rows: &[Row]) -> Vec<String> {
    let mean = |value: &dyn Fn(&Row) -> f64| rows.iter().map(value).sum::<f64>() / rows.len() as f64;
    let mut densities: Vec<f64> = rows.iter().map(|row| row.density).collect();
    densities.sort_by(f64::total_cmp);
    let at = |share: usize| densities[share * (densities.len() - 1) / 2];
    let share = |value: fn(&Mass) -> f64| format!("{:.3}", mean(&|row| value(&row.mass) / row.mass.queries));
    let mut cells = vec![
        name,
        format!("{:.3}", mean(&|row| row.density)),
        format!("{:.3} {:.3} {:.3}", at(0), at(1), at(2)),
        format!("{:.1}", mean(&|row| row.visited)),
        share(|mass| mass.sink),
        share(|mass| mass.local),
        share(|mass| mass.rest),
    ];
    cells.extend((0..TOP.len()).map(|i| format!("{:.3}", mean(&|row| row.mass.top[i] / row.mass.queries))));
    cells
}

/// Softmax mass, summed over queries.
#[derive(Debug, Clone, Copy, Default)]
struct Mass {
    queries: f64,
    sink: f64,
    local: f64,
    rest: f64,
    /// Mass of the strongest keys of the rest, for each share of [`TOP`].
    top: [f64; TOP.len()],
}

impl Mass {
    /// The mass of one query, from its scores. Leaves weights in `scores`, those of the rest in descending order.
    fn of(scores: &mut [f32]) -> Self {
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        scores.iter_mut().for_each(|score| *score = (*score - max).exp());
        let sum = |weights: &[f32]| weights.iter().map(|weight| f64::from(*weight)).sum::<f64>();
        let all = sum(scores);
        let local = scores.len() - LOCAL.min(scores.len());
        let sink = SINK.min(local);
        let (sink_mass, local_mass) = (sum(&scores[..sink]), sum(&scores[local..]));
        let rest = &mut scores[sink..local];
        rest.sort_unstable_by(|a, b| b.total_cmp(a));
        let rest_mass = sum(rest);
        let top = TOP.map(|share| {
            let count = (share * rest.len() as f64).ceil() as usize;
            if rest_mass > 0.0 { sum(&rest[..count]) / rest_mass } else { 0.0 }
        });
        Self { queries: 1.0, sink: sink_mass / all, local: local_mass / all, rest: rest_mass / all, top }
    }
}

impl AddAssign for Mass {
    fn add_assign(&mut self, other: Self) {
        self.queries += other.queries;
        self.sink += other.sink;
        self.local += other.local;
        self.rest += other.rest;
        self.top.iter_mut().zip(other.top).for_each(|(top, other)| *top += other);
    }
}

/// S2O that measures the scores of some queries before it computes attention.
#[derive(Debug)]
struct Observer {
    s2o: S2o,
    positions: Vec<usize>,
    /// By layer and head.
    heads: Mutex<Vec<Vec<Mass>>>,
}

impl Attention for Observer {
    fn name(&self) -> &str {
        self.s2o.name()
    }

    fn prefill(&self, call: &PrefillCall, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let (_, q_len, num_heads, head_dim) = q.dims4()?;
        let (_, k_len, num_kv_heads, _) = k.dims4()?;
        let group = num_heads / num_kv_heads;
        for position in self.positions.iter().filter(|position| (k_len - q_len..k_len).contains(*position)) {
            let q = q.narrow(1, position + q_len - k_len, 1)?.to_dtype(DType::F32)?;
            let q = (q.reshape((num_kv_heads, group, head_dim))? * f64::from(call.softmax_scale))?;
            for kv_head in 0..num_kv_heads {
                let k = k.narrow(1, 0, position + 1)?.narrow(2, kv_head, 1)?.reshape((position + 1, head_dim))?;
                let scores = k.to_dtype(DType::F32)?.matmul(&q.get(kv_head)?.t()?.contiguous()?)?.t()?.to_vec2()?;
                for (i, mut scores) in scores.into_iter().enumerate() {
                    let mass = Mass::of(&mut scores);
                    let mut heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
                    heads[call.layer][kv_head * group + i] += mass;
                }
            }
        }
        self.s2o.prefill(call, q, k, v)
    }
}
