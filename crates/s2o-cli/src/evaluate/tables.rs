//! The results of a run: tables in files and on the terminal, and files for other projects' scripts.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use s2o_eval::report::{NiahResult, Row, RulerPrediction, markdown, rows, write_csv};
use s2o_eval::run::{Key, Outcome, Sample};
use s2o_eval::tasks::RULER;
use s2o_models::LoadedModel;

use crate::exit;
use crate::layout::{Look, seconds};

/// The task whose results others draw.
const NIAH: &str = "niah";

/// Writes `table.csv`, `table.md` and, of the task `niah`, `niah/*.json` into `directory`.
pub fn write(directory: &Path, outcomes: &[Outcome]) -> Result<()> {
    write_csv(&directory.join("table.csv"), &rows(outcomes))?;
    let path = directory.join("table.md");
    fs::write(&path, markdown(outcomes)).with_context(|| cannot_write(&path))?;
    let mut needles: Vec<(String, Vec<NiahResult>)> = Vec::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.task == NIAH) {
        let Some(result) = NiahResult::of(outcome) else { continue };
        let name = file_name(&outcome.key);
        match needles.iter_mut().find(|(there, _)| *there == name) {
            Some((_, results)) => results.push(result),
            None => needles.push((name, vec![result])),
        }
    }
    for (name, results) in needles {
        let path = directory.join(NIAH).join(name + ".json");
        let mut file = create(&path)?;
        serde_json::to_writer_pretty(&mut file, &results)?;
        file.flush().with_context(|| cannot_write(&path))?;
    }
    Ok(())
}

/// Writes RULER's prediction files, `ruler/RUN/LENGTH/TASK.jsonl`, into `directory`.
pub fn write_predictions(
    directory: &Path,
    outcomes: &[Outcome],
    samples: &[Sample],
    model: &LoadedModel,
) -> Result<()> {
    let mut open: Vec<(PathBuf, BufWriter<File>)> = Vec::new();
    let is_ruler = |sample: &&Sample| {
        let task = sample.task();
        task.starts_with("ruler/") || RULER.contains(&task)
    };
    for sample in samples.iter().filter(is_ruler) {
        let Some(item) = sample.item(&model.tokenizer)? else { continue };
        for outcome in outcomes.iter().filter(|outcome| outcome.key.sample == item.id) {
            let Some(prediction) = RulerPrediction::of(outcome, &item) else { continue };
            let task = item.task.trim_start_matches("ruler/");
            let length = outcome.context_tokens.to_string();
            let path = directory.join("ruler").join(file_name(&outcome.key)).join(length).join(format!("{task}.jsonl"));
            let place = match open.iter().position(|(there, _)| *there == path) {
                Some(place) => place,
                None => {
                    open.push((path.clone(), create(&path)?));
                    open.len() - 1
                }
            };
            writeln!(open[place].1, "{}", serde_json::to_string(&prediction)?).with_context(|| cannot_write(&path))?;
        }
    }
    open.iter_mut().try_for_each(|(path, file)| file.flush().with_context(|| cannot_write(path)))
}

/// Prints accuracies and perplexities.
pub fn print(outcomes: &[Outcome]) -> Result<()> {
    let look = Look::of_stdout();
    let all = rows(outcomes);
    let rows: Vec<&Row> = all.iter().filter(|row| row.group.is_empty()).collect();
    let mut text = String::new();
    let is_several = |value: fn(&Row) -> &String| rows.iter().any(|row| value(row) != value(rows[0]));
    let (models, chunks) = (is_several(|row| &row.model), is_several(|row| &row.chunk));
    let (answers, passages): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.score.is_some());
    let place = |row: &Row| {
        let mut cells = vec![row.task.clone(), row.context_tokens.to_string()];
        cells.extend(models.then(|| row.model.clone()));
        cells.push(row.method.clone());
        cells.extend(chunks.then(|| row.chunk.clone()));
        cells
    };
    let mut header = vec!["task", "context"];
    header.extend(models.then_some("model"));
    header.push("method");
    header.extend(chunks.then_some("chunk"));
    if !answers.is_empty() {
        let mut header = header.clone();
        header.extend(["items", "accuracy", "95 %", "density", "prefill"]);
        header.extend(chunks.then_some("changed"));
        let mut table = look.table(header);
        for row in answers {
            let mut cells = place(row);
            let percent = |share: f64| format!("{:.1}", 100.0 * share);
            let interval = row.score_low.zip(row.score_high);
            cells.push(row.items.to_string());
            cells.push(row.score.map(percent).unwrap_or_default());
            cells
                .push(interval.map(|(low, high)| format!("{} to {}", percent(low), percent(high))).unwrap_or_default());
            cells.push(format!("{:.3}", row.density));
            cells.push(seconds(row.prefill_seconds));
            cells.extend(chunks.then(|| row.changed_by_chunks.map(|count| count.to_string()).unwrap_or_default()));
            table.add_row(cells);
        }
        text.push_str(&format!("{table}\n"));
    }
    if !passages.is_empty() {
        header.extend(["perplexity", "density", "top-1 agrees", "prefill"]);
        let mut table = look.table(header);
        for row in passages {
            let mut cells = place(row);
            let number = |value: Option<f64>| value.map(|value| format!("{value:.3}")).unwrap_or_default();
            cells.extend([number(row.perplexity), number(Some(row.density)), number(row.top1_agreement)]);
            cells.push(seconds(row.prefill_seconds));
            table.add_row(cells);
        }
        text.push_str(&format!("{table}\n"));
    }
    if all.len() > rows.len() {
        text.push_str("groups are in table.md\n");
    }
    exit::print(&text)
}

/// The name of the files about one method, model and chunk size.
fn file_name(key: &Key) -> String {
    let name = format!("{}-{}-chunk-{}", key.setting.model, key.method, key.setting.chunk);
    name.replace(|c: char| !(c.is_ascii_alphanumeric() || "-._=".contains(c)), "_")
}

fn create(path: &Path) -> Result<BufWriter<File>> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| cannot_write(path))?;
    }
    Ok(BufWriter::new(File::create(path).with_context(|| cannot_write(path))?))
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
