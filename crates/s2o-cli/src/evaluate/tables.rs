//! Results of a run: tables in files and on the terminal, and files for other projects' scripts.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use s2o_eval::report::{
    CHANGED, Column, Row, answer_columns, grouped, markdown, naming_columns, niah_result, perplexity_columns, rows,
    ruler_prediction, unpaired, write_csv,
};
use s2o_eval::run::{Key, Outcome, Sample};
use s2o_eval::tasks::is_ruler;
use s2o_models::LoadedModel;

use crate::exit;
use crate::layout::{Look, seconds};
use crate::writable::cannot_write;

/// The task with files for other projects' plots.
const NIAH: &str = "niah";

/// Writes `table.csv`, `table.md` and, for the task `niah`, `niah/*.json` into `directory`.
pub fn write(directory: &Path, outcomes: &[Outcome]) -> Result<()> {
    write_csv(&directory.join("table.csv"), &rows(outcomes))?;
    let path = directory.join("table.md");
    fs::write(&path, markdown(outcomes)).with_context(|| cannot_write(&path))?;
    let needles = outcomes.iter().filter(|outcome| outcome.task == NIAH && niah_result(outcome).is_some());
    for outcomes in grouped(needles, |outcome| file_name(&outcome.key)) {
        let results: Vec<_> = outcomes.iter().filter_map(|outcome| niah_result(outcome)).collect();
        let path = directory.join(NIAH).join(file_name(&outcomes[0].key) + ".json");
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
    let mut open: HashMap<PathBuf, BufWriter<File>> = HashMap::new();
    for sample in samples.iter().filter(|sample| is_ruler(sample.task())) {
        let Some(item) = sample.item(&model.tokenizer)? else { continue };
        for outcome in outcomes.iter().filter(|outcome| outcome.key.sample == item.id) {
            let Some(prediction) = ruler_prediction(outcome, &item) else { continue };
            let task = item.task.trim_start_matches("ruler/");
            let length = outcome.context_tokens.to_string();
            let path = directory.join("ruler").join(file_name(&outcome.key)).join(length).join(format!("{task}.jsonl"));
            let line = serde_json::to_string(&prediction)?;
            let file = match open.entry(path.clone()) {
                Entry::Occupied(file) => file.into_mut(),
                Entry::Vacant(place) => place.insert(create(&path)?),
            };
            writeln!(file, "{line}").with_context(|| cannot_write(&path))?;
        }
    }
    open.iter_mut().try_for_each(|(path, file)| file.flush().with_context(|| cannot_write(path)))
}

/// Prints accuracies and perplexities.
pub fn print(outcomes: &[Outcome]) -> Result<()> {
    let all = rows(outcomes);
    let rows: Vec<&Row> = all.iter().filter(|row| row.group.is_empty()).collect();
    let naming = naming_columns(&rows);
    let prefill = Column { name: "prefill", cell: |row| seconds(row.prefill_seconds) };
    // Only a run with several chunk sizes compares their answers.
    let changed = naming.iter().any(|column| column.name == "chunk").then_some(CHANGED);
    let (answers, passages): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.score.is_some());
    let of_answers = answer_columns().into_iter().chain([prefill]).chain(changed).collect();
    let of_passages = perplexity_columns().into_iter().chain([prefill]).collect();
    let mut text = String::new();
    for (rows, own) in [(answers, of_answers), (passages, of_passages)] {
        let columns = [naming.clone(), own].concat();
        let mut table = Look::of_stdout().table(columns.iter().map(|column| column.name));
        for row in &rows {
            table.add_row(columns.iter().map(|column| (column.cell)(row)));
        }
        if !rows.is_empty() {
            text.push_str(&format!("{table}\n"));
        }
    }
    if all.len() > rows.len() {
        text.push_str("groups are in table.md\n");
    }
    if let Some(left_out) = unpaired(outcomes) {
        text.push_str(&(left_out + "\n"));
    }
    exit::print(&text)
}

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
