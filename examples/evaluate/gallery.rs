//! `gallery`: the pictures and tables of a page, from rows.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use s2o_eval::gallery::{Gallery, Made};

use crate::cli::exit;

/// Makes the pictures and tables of docs/results.md from the rows in the repository
///
/// What stands between `<!-- gallery: NAME -->` and `<!-- /gallery -->` is rewritten, all else stays; docs/experiments.md
/// says which names there are.
#[derive(Debug, Args)]
pub struct Flags {
    /// The page
    #[arg(long, value_name = "FILE", default_value = "docs/results.md")]
    page: PathBuf,
    /// Directory of the directories that experiments and runs wrote
    #[arg(long, value_name = "DIR", default_value = "docs/results")]
    rows: PathBuf,
    /// Directory of the benchmarks' record
    #[arg(long, value_name = "DIR", default_value = "benches/record")]
    record: PathBuf,
    /// Write nothing, and fail if the page or a picture is out of date
    #[arg(long)]
    check: bool,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        let gallery = Gallery { page: self.page.clone(), rows: self.rows.clone(), record: self.record.clone() };
        let made = if self.check { gallery.check()? } else { gallery.update()? };
        let text: String = made.iter().map(|entry| self.entry(entry)).collect();
        exit::print(&text)
    }

    fn entry(&self, Made { name, line, pictures }: &Made) -> String {
        let pictures: Vec<String> = pictures.iter().map(|path| format!("  {}\n", path.display())).collect();
        format!("{}, line {line}: {name}\n{}", self.page.display(), pictures.concat())
    }
}
