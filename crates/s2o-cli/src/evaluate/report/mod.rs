//! `report`: the tables of a run again, or a report in Markdown with pictures.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Error, Result, bail};
use clap::Args;
use s2o_eval::report::{Row, comparisons, differing_items, rows, rows_of_models, write_csv};
use s2o_eval::run::{Outcome, read_outcomes};
use s2o_eval::{EvalError, Provenance};

use super::run::{OUTCOMES, RUNS};
use super::tables;
use crate::exit;
use crate::writable::{self, cannot_write};

mod page;
mod pictures;

/// The report's text.
const REPORT: &str = "report.md";
/// Scores by task, as in the directory of a run.
const TABLE: &str = "table.csv";
/// Differences from exact attention with their intervals.
const DIFFERENCES: &str = "differences.csv";
/// The items whose scores differ.
const ITEMS: &str = "differing-items.csv";

/// Make the tables of a run again, even while it is running, or a report of it
///
/// Without --out it writes table.csv and table.md into the directory of the run and prints the tables.
#[derive(Debug, Args)]
pub struct Flags {
    /// Directory that `run` got as --out
    #[arg(default_value = "evaluation")]
    directory: PathBuf,
    /// Write report.md with its pictures and CSV files into this directory instead; an older report is replaced
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        match &self.out {
            Some(out) => self.report(out),
            None => {
                let outcomes = self.outcomes()?;
                tables::write(&self.directory, &outcomes)?;
                tables::print(&outcomes)
            }
        }
    }

    fn outcomes(&self) -> Result<Vec<Outcome>> {
        read_outcomes(self.directory.join(OUTCOMES)).map_err(|error| match error {
            EvalError::Io { ref source, .. } if source.kind() == ErrorKind::NotFound => {
                Error::from(error).context("expected the directory of `s2o evaluate run --out`")
            }
            error => error.into(),
        })
    }

    fn report(&self, out: &Path) -> Result<()> {
        writable::directory(out)?;
        let files = [REPORT, TABLE, DIFFERENCES, ITEMS].map(str::to_owned).into_iter().chain(pictures::files());
        let files: Vec<PathBuf> = files.map(|name| out.join(name)).filter(|path| path.exists()).collect();
        files.iter().try_for_each(|path| writable::file(path))?;
        let outcomes = self.outcomes()?;
        let rows = rows(&outcomes);
        check(&self.directory.join(OUTCOMES), &outcomes, &rows_of_models(&rows))?;
        let origins = self.origins()?;
        let comparisons = comparisons(&outcomes);
        let items = differing_items(&outcomes);

        // A picture of the older report may have no successor.
        files.iter().try_for_each(|path| fs::remove_file(path).with_context(|| cannot_write(path)))?;
        fs::create_dir_all(out).with_context(|| cannot_write(out))?;
        write_csv(&out.join(TABLE), &rows)?;
        write_csv(&out.join(DIFFERENCES), &comparisons)?;
        write_csv(&out.join(ITEMS), &items)?;
        let pictures = pictures::draw(out, &comparisons)?;
        let page = page::Page {
            run: &self.directory,
            out,
            outcomes: &outcomes,
            origins: &origins,
            comparisons: &comparisons,
            items: &items,
            pictures: &pictures,
        };
        let path = out.join(REPORT);
        fs::write(&path, page.text()).with_context(|| cannot_write(&path))?;
        exit::print(&format!(
            "{}: {} outcomes, {} pictures, {TABLE}, {DIFFERENCES} and {ITEMS} beside it\n",
            path.display(),
            outcomes.len(),
            pictures.len(),
        ))
    }

    /// The origins in runs.csv; none if the file is missing.
    fn origins(&self) -> Result<Vec<Provenance>> {
        let path = self.directory.join(RUNS).with_extension("csv");
        let file = match fs::File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let rows = csv::Reader::from_reader(file).into_deserialize().collect::<csv::Result<Vec<Provenance>>>();
        rows.with_context(|| format!("{}: expected the rows that `evaluate run` writes", path.display()))
    }
}

/// Refuses outcomes that one report cannot be about.
fn check(path: &Path, outcomes: &[Outcome], models: &[Vec<&Row>]) -> Result<()> {
    if outcomes.is_empty() {
        bail!("{}: expected outcomes, got none; `s2o evaluate run` computes them", path.display());
    }
    match models {
        [_] => Ok(()),
        [] => bail!(
            "{}: expected a sample with the outcomes of all methods, got none; the command of the run goes on where it \
             stopped",
            path.display()
        ),
        models => {
            let name = |rows: &Vec<&Row>| {
                let row = rows[0];
                format!("{} ({}, {}, template {})", row.model, row.dtype, row.device, row.template)
            };
            let names = models.iter().map(name).collect::<Vec<_>>().join(" and ");
            bail!(
                "{}: expected outcomes of one model, precision, device and chat template, got {names}; run each with \
                 its own --out, or leave out --out of `report` for tables of all",
                path.display()
            )
        }
    }
}
