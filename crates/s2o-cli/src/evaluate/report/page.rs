//! The text of a report.

use std::path::Path;

use s2o_eval::Provenance;
use s2o_eval::method::{self, DENSE, MethodSpec};
use s2o_eval::report::{
    ALL_TASKS, Comparison, DifferingItem, ascending, distinct, grouped, inline, pivot, plain, table, task_tables,
    unpaired,
};
use s2o_eval::run::Outcome;

use super::pictures::{Picture, Subject, label};
use super::{DIFFERENCES, ITEMS, RUNS, TABLE};
use crate::layout::{duration, seconds, shell_word};

/// The most items that the text lists.
const LISTED_ITEMS: usize = 20;
/// The most characters of an answer in a table.
const LONGEST_ANSWER: usize = 60;

/// What a report is about.
pub struct Page<'r> {
    /// The directory of the run.
    pub run: &'r Path,
    /// The directory of the report.
    pub out: &'r Path,
    /// At least one outcome, all of one model, precision, device and chat template.
    pub outcomes: &'r [Outcome],
    pub origins: &'r [Provenance],
    pub comparisons: &'r [Comparison],
    pub items: &'r [DifferingItem],
    pub pictures: &'r [Picture],
}

impl Page<'_> {
    /// The whole page.
    pub fn text(&self) -> String {
        let model = &self.outcomes[0].key.setting.model;
        let mut sections = vec![format!("# {}: exact and sparse attention\n", inline(model)), self.settings()];
        if !self.means().is_empty() {
            sections.push(self.result());
            sections.push(self.density());
            sections.push(self.time());
        }
        sections.push(self.tasks());
        sections.extend(self.differing());
        sections.push(self.methods());
        sections.push(self.origin());
        sections.join("\n")
    }

    /// The rows over all tasks.
    fn means(&self) -> Vec<&Comparison> {
        self.comparisons.iter().filter(|row| row.task == ALL_TASKS).collect()
    }

    fn has_dense(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.key.method == DENSE)
    }

    fn settings(&self) -> String {
        let setting = &self.outcomes[0].key.setting;
        let column = |of: fn(&Provenance) -> &String, otherwise: &str| {
            let values = distinct(self.origins.iter().map(of).filter(|value| !value.is_empty()).map(String::as_str));
            let values: Vec<String> = values.into_iter().map(plain).collect();
            if values.is_empty() { otherwise.to_owned() } else { values.join("; ") }
        };
        let list = |values: Vec<&str>| values.into_iter().map(plain).collect::<Vec<_>>().join(", ");
        let lengths = ascending(self.outcomes.iter().map(|outcome| outcome.context_tokens));
        let prompts = |length: usize| {
            let own = self.outcomes.iter().filter(|outcome| outcome.context_tokens == length);
            format!("{} of {length}", distinct(own.map(|outcome| outcome.key.sample.as_str())).len())
        };
        let prompts: Vec<String> = lengths.into_iter().map(prompts).collect();
        let chunks = list(distinct(self.outcomes.iter().map(|outcome| outcome.key.setting.chunk.as_str())));
        let lines = [
            ("model", column(|origin| &origin.source, &plain(&setting.model))),
            ("device", column(|origin| &origin.device, &setting.device)),
            ("precision", plain(&setting.dtype)),
            ("chat template, chunk", format!("{}, {chunks}", setting.template)),
            ("methods", list(distinct(self.outcomes.iter().map(|outcome| outcome.key.method.as_str())))),
            ("tasks", list(distinct(self.outcomes.iter().map(|outcome| outcome.task.as_str())))),
            ("prompts, by tokens", prompts.join(", ")),
            ("commit, date", format!("{}, {}", column(|o| &o.commit, "unknown"), column(|o| &o.date, "unknown"))),
        ];
        let lines = lines.into_iter().map(|(name, value)| vec![name.to_owned(), value]);
        let mut text = table(&["run", ""], lines);
        if let Some(left_out) = unpaired(self.outcomes) {
            text.push_str(&format!("\n{left_out}\n"));
        }
        text
    }

    fn result(&self) -> String {
        let means = self.means();
        let longest = means.iter().map(|row| row.context_tokens).max().unwrap_or_default();
        let mut text = String::from("## Result\n\n");
        if self.has_dense() {
            let last = means.iter().filter(|row| row.context_tokens == longest && row.method != DENSE);
            last.for_each(|row| text.push_str(&sentence(row, &self.name(row))));
        } else {
            text.push_str(
                "Exact attention was not run, so there is nothing to compare with. The same command with `dense` among \
                 its `--methods` adds it.\n",
            );
        }
        text.push_str(&format!(
            "\nMean score in percent, {} with the same weight, by prompt length in tokens:\n\n{}",
            tasks(&means),
            self.by_length(&means, |row| Some(percent(row.score))),
        ));
        if means.iter().any(|row| row.difference.is_some()) {
            text.push_str(&format!(
                "\nDifference from exact attention in points ([intervals]({DIFFERENCES})):\n\n{}",
                self.by_length(&sparse(&means), |row| row.difference.map(points)),
            ));
        }
        self.show(&mut text, Subject::Score);
        if means.iter().any(|row| row.strict_score != row.score) {
            text.push_str(&format!(
                "\nThe same score with 0 for answers that do not begin with a right one. The prefill alone decides how \
                 an answer begins:\n\n{}",
                self.by_length(&means, |row| Some(percent(row.strict_score))),
            ));
        }
        text
    }

    fn density(&self) -> String {
        let means = self.means();
        let mut text = format!(
            "## Density\n\nShare of the causal tiles that the prefill computes, 1 for exact attention:\n\n{}",
            self.by_length(&sparse(&means), |row| Some(format!("{:.3}", row.density))),
        );
        self.show(&mut text, Subject::Density);
        text
    }

    fn time(&self) -> String {
        let means = self.means();
        let mut text = format!(
            "## Time of the prefill\n\nMedian wall time of whole prefills, linear layers included:\n\n{}",
            self.by_length(&means, |row| Some(seconds(row.prefill_seconds))),
        );
        if sparse(&means).iter().any(|row| row.speed_up.is_some()) {
            let ratio = |row: &Comparison| row.speed_up.map(|ratio| format!("{ratio:.2}"));
            let ratios = self.by_length(&sparse(&means), ratio);
            text.push_str(&format!("\nTimes as fast as exact attention:\n\n{ratios}"));
        }
        self.show(&mut text, Subject::SpeedUp);
        let total: f64 = self.outcomes.iter().map(|outcome| outcome.prefill_seconds).sum();
        text.push_str(&format!("\nAll prefills together took {}.\n", duration(total)));
        text
    }

    fn tasks(&self) -> String {
        format!("## By task\n\n[{TABLE}]({TABLE}) has intervals of the scores.\n\n{}", task_tables(self.outcomes))
    }

    fn differing(&self) -> Option<String> {
        if !self.has_dense() || self.means().is_empty() {
            return None;
        }
        let heading = "## Items whose score differs from that of exact attention\n\n";
        if self.items.is_empty() {
            return Some(format!("{heading}None.\n"));
        }
        let listed = self.items.iter().take(LISTED_ITEMS).map(|item| {
            let method = label(&item.method, &item.chunk, self.comparisons);
            let scores = [item.score, item.dense_score].map(percent);
            let answers = [&item.references, &item.prediction, &item.dense_prediction].map(|text| code(text));
            [item.sample.clone(), method].into_iter().chain(scores).chain(answers).collect()
        });
        let header = ["item", "method", "score", "exact", "right", "answer", "exact attention's answer"];
        let count = match self.items.len() {
            count if count > LISTED_ITEMS => format!("The first {LISTED_ITEMS} of {count}"),
            count => format!("All {count}"),
        };
        let listed = table(&header, listed);
        Some(format!("{heading}{count}, with scores in percent; [{ITEMS}]({ITEMS}) has whole answers.\n\n{listed}"))
    }

    fn methods(&self) -> String {
        let names = distinct(self.outcomes.iter().map(|outcome| outcome.key.method.as_str()));
        let lines = names.into_iter().map(|name| {
            let (spec, density) = name.split_once('@').map_or((name, None), |(spec, density)| (spec, Some(density)));
            // A journal may have methods that no longer exist.
            let row = spec.parse::<MethodSpec>().and_then(|spec| method::find(spec.name()));
            let mut summary = row.map_or("unknown to this version", |row| row.summary).to_owned();
            if let Some(options) = spec.split_once(':').map(|(_, options)| options) {
                summary.push_str(&format!("; with {}", options.replace(':', ", ")));
            }
            if let Some(density) = density {
                summary.push_str(&format!("; set to density {density}, see knobs.csv of the run"));
            }
            vec![code(name), summary]
        });
        format!("## Methods\n\n{}", table(&["method", ""], lines))
    }

    fn origin(&self) -> String {
        let commands = distinct(self.origins.iter().map(|origin| command(&origin.command)));
        let run = self.run.display().to_string();
        if commands.is_empty() {
            return format!("## Commands\n\n{} has no {RUNS}.csv, which names the command of a run.\n", inline(&run));
        }
        let which = if commands.len() == 1 { "The same" } else { "The last" };
        format!(
            "## Commands\n\nThe outcomes were computed by\n\n```sh\n{}\n```\n\n{which} command goes on where it stopped. \
             Other tasks, lengths and methods with the same `--out` are added to the outcomes. This report is made \
             again by\n\n```sh\ns2o evaluate report {} --out {}\n```\n",
            commands.join("\n"),
            shell_word(&run),
            shell_word(&self.out.display().to_string()),
        )
    }

    /// Methods as rows, lengths as columns.
    fn by_length(&self, rows: &[&Comparison], cell: impl Fn(&Comparison) -> Option<String>) -> String {
        let lengths = ascending(rows.iter().map(|row| row.context_tokens));
        let columns: Vec<(String, usize)> = lengths.into_iter().map(|length| (length.to_string(), length)).collect();
        let lines = grouped(rows.iter().copied(), |row| (&row.method, &row.chunk));
        let lines = lines.into_iter().map(|rows| (vec![self.name(rows[0])], rows));
        pivot(&["method"], &columns, lines, |rows, length| {
            rows.iter().find(|row| row.context_tokens == *length).and_then(|row| cell(row))
        })
    }

    fn show(&self, text: &mut String, subject: Subject) {
        if let Some(Picture { file, description, .. }) = self.pictures.iter().find(|picture| picture.subject == subject)
        {
            text.push_str(&format!("\n![{description}]({file})\n"));
        }
    }

    fn name(&self, row: &Comparison) -> String {
        label(&row.method, &row.chunk, self.comparisons)
    }
}

fn sparse<'r>(rows: &[&'r Comparison]) -> Vec<&'r Comparison> {
    rows.iter().copied().filter(|row| row.method != DENSE).collect()
}

/// How exact, how fast and how sparse a method is at one length.
fn sentence(row: &Comparison, name: &str) -> String {
    let mut text = format!("- **{}** at {} tokens: score {} %", inline(name), row.context_tokens, percent(row.score));
    let interval = row.difference.zip(row.difference_low.zip(row.difference_high));
    match interval {
        Some((difference, (low, high))) => text.push_str(&format!(
            ", {} points from exact attention (95 % interval {} to {}{}). Of {} items {} are worse and {} better. ",
            points(difference),
            points(low),
            points(high),
            if low <= 0.0 && high >= 0.0 { ", which includes 0" } else { "" },
            row.items,
            row.worse.unwrap_or_default(),
            row.better.unwrap_or_default(),
        )),
        None => text.push_str(". "),
    }
    text.push_str(&format!("Density {:.3}.", row.density));
    if let Some(ratio) = row.speed_up {
        text.push_str(&format!(" The prefill is {ratio:.2} times as fast."));
    }
    text + "\n"
}

/// The number of tasks, or the numbers if the lengths have different ones.
fn tasks(means: &[&Comparison]) -> String {
    match distinct(means.iter().map(|row| row.tasks)).as_slice() {
        [1] => "one task".to_owned(),
        [count] => format!("{count} tasks"),
        _ => "the tasks of each length".to_owned(),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// A difference of shares in percentage points, with its sign. Zero has none.
fn points(share: f64) -> String {
    let text = format!("{:+.1}", 100.0 * share);
    if text == "+0.0" || text == "-0.0" { "0.0".to_owned() } else { text }
}

/// Text of a model on one line, cut to a length, as code.
fn code(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "'");
    if let Some((end, _)) = line.char_indices().nth(LONGEST_ANSWER) {
        line.truncate(end);
        line.push_str(" ...");
    }
    if line.is_empty() { line } else { format!("`{line}`") }
}

/// The command as a user calls it. Rows name only its arguments.
fn command(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.starts_with("evaluate ") { format!("s2o {line}") } else { line }
}
