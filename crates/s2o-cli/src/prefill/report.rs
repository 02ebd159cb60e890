//! The results of the runs, as text and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use candle_s2o::{AttnStats, HeadStats, S2o};
use comfy_table::{Cell, Color};
use s2o_eval::metrics::{ErrorSums, Errors};
use s2o_models::weights::EMBEDDED;
use s2o_models::{HeadTiles, LoadedModel, passkey};
use serde::Serialize;

use super::run::Run;
use crate::layout::{Look, error, grouped, seconds};
use crate::prompt_flags::Prompt;
use crate::{machine, model_flags, s2o_flags};

const BAR_WIDTH: usize = 24;
/// Fewest generated tokens that give a rate.
const RATED_TOKENS: usize = 8;
/// A measured error above this is worth a warning: layers of trained models have .01 to .3.
const LARGE_ERROR: f64 = 0.3;

type Stats = BTreeMap<usize, AttnStats>;

pub struct Report<'a> {
    pub model: &'a LoadedModel,
    pub prompt: &'a Prompt,
    pub s2o: &'a S2o,
    /// Whether thresholds differ between layers.
    pub by_layer: bool,
    /// Precision of the dense run, if it is another one.
    pub reference: Option<String>,
    pub dense: Option<Run>,
    pub sparse: Option<(Run, Stats)>,
}

/// The object of `--json`. Values that were not measured are null.
#[derive(Debug, Serialize)]
pub struct Json<'a> {
    model: &'a str,
    precision: String,
    precision_dense: Option<String>,
    tokens: usize,
    seconds_dense: Option<f64>,
    seconds_s2o: Option<f64>,
    density: Option<f64>,
    rel_l1: Option<f64>,
    top1_agree: Option<f64>,
    answer_dense: Option<&'a str>,
    answer_s2o: Option<&'a str>,
    expected: Option<&'a str>,
}

impl Report<'_> {
    pub fn json(&self) -> Result<Json<'_>> {
        let (dense, sparse) = (self.dense.as_ref(), self.sparse.as_ref());
        let difference = self.difference()?;
        Ok(Json {
            model: &self.model.name,
            precision: self.model.decoder.precision(),
            precision_dense: dense.map(|_| self.reference.clone().unwrap_or_else(|| self.model.decoder.precision())),
            tokens: self.prompt.tokens.len(),
            seconds_dense: dense.map(|run| run.prefill.as_secs_f64()),
            seconds_s2o: sparse.map(|(run, _)| run.prefill.as_secs_f64()),
            density: sparse.map(|(_, stats)| density(stats)),
            rel_l1: difference.map(|(hidden, _)| hidden.rel_l1),
            top1_agree: difference.map(|(_, agreement)| agreement),
            answer_dense: dense.map(|run| self.answer(run)),
            answer_s2o: sparse.map(|(run, _)| self.answer(run)),
            expected: self.prompt.expected.as_deref(),
        })
    }

    /// Header, table, chart by layer, answers, and the machine.
    pub fn text(&self, look: Look) -> Result<String> {
        let mut out = String::new();
        writeln!(out, "model   {}", model_flags::describe(self.model))?;
        if self.model.is_synthetic {
            let text = "SYNTHETIC: made-up weights. Time, memory and density count; answers and differences do not";
            writeln!(out, "        {text}")?;
        }
        if let Some(precision) = &self.reference {
            writeln!(out, "dense   in {precision}: the differences are those of S2O and of 8 bits together")?;
        }
        writeln!(out, "prompt  {}", self.prompt.description)?;
        if self.sparse.is_some() {
            let options = s2o_flags::describe(
                self.s2o.config_of(usize::MAX),
                self.by_layer,
                self.prompt.tokens.len(),
                self.model.decoder.device(),
            );
            writeln!(out, "S2O     {options}")?;
        }
        if let Some(parallel) = self.model.decoder.parallel() {
            write!(out, "ranks   {}, {} parallel", parallel.world_size(), parallel.mode())?;
            match &self.sparse {
                Some((_, stats)) => {
                    let busiest = parallel.busiest(&HeadTiles::of(stats, self.model.config()));
                    writeln!(out, "; the busiest computes {busiest:.2} of the mean number of tiles")?;
                }
                None => writeln!(out)?,
            }
        }
        writeln!(out, "\n{}\n", self.table(look)?)?;
        if let Some((sparse, stats)) = &self.sparse {
            if density(stats) < 1.0 {
                self.chart(&mut out, look, sparse, stats)?;
            } else if !self.is_short() {
                writeln!(out, "S2O computed all key tiles of every layer: there is nothing to chart by layer\n")?;
            }
        }
        self.answers(&mut out)?;
        writeln!(out, "{}", machine::describe(self.model.decoder.device()))?;
        Ok(out)
    }

    /// Whether the prompt is so short that S2O uses the dense path, as the header says.
    fn is_short(&self) -> bool {
        let least = s2o_flags::dense_below(self.s2o.config_of(usize::MAX), self.model.decoder.device());
        self.prompt.tokens.len() < least
    }

    fn table(&self, look: Look) -> Result<comfy_table::Table> {
        let dense = self.dense.as_ref().map(|run| ("dense", run));
        let sparse = self.sparse.as_ref().map(|(run, _)| ("S2O", run));
        let runs: Vec<(&str, &Run)> = dense.into_iter().chain(sparse).collect();
        let difference = self.difference()?;
        let header = [""].into_iter().chain(runs.iter().map(|(name, _)| *name));
        let mut table = look.table(header.chain(difference.map(|_| "speed-up")));

        let speed_up = |time: fn(&Run) -> Duration| {
            let ((_, dense), (_, sparse)) = (dense?, sparse?);
            Some(Cell::new(format!("{:.2}x", time(dense).as_secs_f64() / time(sparse).as_secs_f64())))
        };
        let row = |name: &str, cell: &dyn Fn(&Run) -> String, last: Option<Cell>| {
            let cells = runs.iter().map(|(_, run)| Cell::new(cell(run)));
            [Cell::new(name)].into_iter().chain(cells).chain(last).collect::<Vec<_>>()
        };
        let time = |time: fn(&Run) -> Duration| move |run: &Run| seconds(time(run).as_secs_f64());
        let tokens = self.prompt.tokens.len() as f64;
        table.add_row(row("prefill", &time(|run| run.prefill), speed_up(|run| run.prefill)));
        table.add_row(row("tokens/s", &|run| grouped(tokens / run.prefill.as_secs_f64()), None));
        table.add_row(row("attention", &time(Run::attention_total), speed_up(Run::attention_total)));
        // The time of a few tokens is that of the first.
        if runs.iter().all(|(_, run)| run.num_generated >= RATED_TOKENS) {
            let per_second = |run: &Run| format!("{:.1}", run.num_generated as f64 / run.decode.as_secs_f64());
            table.add_row(row("decode tokens/s", &per_second, None));
        }

        // Dense has no such values: it computes everything and is the reference of the differences.
        let mut sparse_row = |name: &str, value: String| {
            let dense = dense.map(|_| Cell::new(if name == "density" { "1.000" } else { "" }));
            table.add_row([Cell::new(name)].into_iter().chain(dense).chain([Cell::new(value)]).collect::<Vec<_>>());
        };
        if let Some((_, stats)) = &self.sparse {
            sparse_row("density", format!("{:.3}", density(stats)));
        }
        if let Some((hidden, top1_agreement)) = difference {
            sparse_row("hidden state: MSE", format!("{:.2e}", hidden.mse));
            sparse_row("  relative L1", format!("{:.2e}", hidden.rel_l1));
            sparse_row("  cosine", format!("{:.6}", hidden.cosine));
            sparse_row("top-1 agreement", format!("{:.1} %", top1_agreement * 100.0));
        }
        if self.prompt.expected.is_some() {
            let verdicts = runs.iter().map(|(_, run)| match self.is_right(run) {
                true => Cell::new("right").fg(Color::Green),
                false => Cell::new("wrong").fg(Color::Red),
            });
            table.add_row([Cell::new("answer")].into_iter().chain(verdicts).collect::<Vec<_>>());
        }
        Ok(table)
    }

    fn chart(&self, out: &mut String, look: Look, sparse: &Run, stats: &Stats) -> Result<()> {
        let dense = self.dense.as_ref();
        let times = if dense.is_some() { "     attention time" } else { "   time" };
        let is_measured = stats.values().any(|layer| layer.probes().is_some());
        let [skipped, heading] = if is_measured { ["  skipped", "  error"] } else { [""; 2] };
        let labels = format!("{:BAR_WIDTH$}  density  window{skipped}  {times}{heading}", "share of tiles computed");
        writeln!(out, "          {labels}")?;
        let arrow = if look == Look::Terminal { "→" } else { "->" };
        for (layer, layer_stats) in stats {
            let mean = |value: fn(&HeadStats) -> f64| {
                layer_stats.heads.iter().map(value).sum::<f64>() / layer_stats.heads.len().max(1) as f64
            };
            let density = layer_stats.density();
            let time = |run: &Run| seconds(run.attention[*layer].as_secs_f64());
            let before = dense.map(|run| format!("{:>7} {arrow} ", time(run))).unwrap_or_default();
            let probes = layer_stats.probes();
            let skipped = probes.map(|probes| format!("  {:>7.3}", probes.mean_skipped_mass()));
            write!(
                out,
                "layer {layer:>3} {}  {density:>7.3}  {:>6.2}{}  {before}{:>7}",
                look.bar(density, BAR_WIDTH),
                mean(HeadStats::local_window_share),
                // A layer without probes in a chart with measured errors.
                skipped.unwrap_or_else(|| if is_measured { " ".repeat(9) } else { String::new() }),
                time(sparse),
            )?;
            if let Some(probes) = probes {
                write!(out, "  {}", error(&probes))?;
            }
            writeln!(out)?;
        }
        writeln!(
            out,
            "density: key tiles computed of those that causal attention has. window: part of them in the query's own\n\
             segment. Means over heads."
        )?;
        if is_measured {
            writeln!(
                out,
                "skipped: softmax mass left out. error: relative L2 error of the attention output, with its\n\
                 95 % interval. Both are measured on the probes."
            )?;
        }
        let is_large = |(_, layer): &(&usize, &AttnStats)| {
            layer.probes().is_some_and(|probes| probes.relative_error() > LARGE_ERROR)
        };
        let large: Vec<String> = stats.iter().filter(is_large).map(|(layer, _)| layer.to_string()).collect();
        if !large.is_empty() {
            writeln!(
                out,
                "warning: the error is above {LARGE_ERROR} in layer {}. --max-error 0.1 visits more keys where the \
                 error is\nlarge, --skip-layers {} makes these layers exact.",
                large.join(", "),
                large.join(",")
            )?;
        }
        let units: Vec<_> = stats.values().flat_map(|layer| &layer.heads).flat_map(|head| &head.probes).collect();
        let again = units.iter().filter(|unit| unit.repeats > 0).count();
        if again > 0 {
            let all = units.len();
            writeln!(
                out,
                "{again} of {all} heads and segments were computed again to keep their error below the bound."
            )?;
        }
        writeln!(out)?;
        Ok(())
    }

    /// The answers. The text of a single run was already printed.
    fn answers(&self, out: &mut String) -> Result<()> {
        if let Some(expected) = &self.prompt.expected {
            writeln!(out, "expected      {expected}")?;
        }
        let both = self.dense.as_ref().zip(self.sparse.as_ref());
        if let Some((dense, (sparse, _))) = both {
            writeln!(out, "dense answers {}", quoted(self.answer(dense)))?;
            writeln!(out, "S2O answers   {}", quoted(self.answer(sparse)))?;
        }
        if self.prompt.expected.is_some() || both.is_some() {
            writeln!(out)?;
        }
        Ok(())
    }

    /// Errors of S2O's hidden state, and the share of positions with the likeliest token of dense.
    fn difference(&self) -> Result<Option<(Errors, f64)>> {
        let (Some(dense), Some((sparse, _))) = (&self.dense, &self.sparse) else { return Ok(None) };
        let [exact, other] = [dense, sparse].map(|run| run.output.hidden.flatten_all()?.to_vec1::<f32>());
        let hidden = ErrorSums::of(&exact?, &other?).errors();
        Ok(Some((hidden, dense.top1_agreement(sparse)?)))
    }

    /// The answer of a passkey task ends with its sentence; any other answer is the whole text.
    fn answer<'r>(&self, run: &'r Run) -> &'r str {
        match self.prompt.expected {
            Some(_) => passkey::answer(&run.text),
            None => &run.text,
        }
    }

    fn is_right(&self, run: &Run) -> bool {
        let Some(expected) = &self.prompt.expected else { return false };
        if self.model.name == EMBEDDED {
            passkey::answers_exactly(&run.text, expected)
        } else {
            passkey::answers(&run.text, expected)
        }
    }
}

/// Density over all layers and heads.
fn density(stats: &Stats) -> f64 {
    AttnStats::joint_density(stats.values())
}

/// Generated text on one line.
fn quoted(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
