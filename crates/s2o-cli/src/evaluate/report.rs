//! `report`: the tables of a run again.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use s2o_eval::run::read_outcomes;

use super::run::OUTCOMES;
use super::tables;

/// Make the tables of a run again, even while it is running
#[derive(Debug, Args)]
pub struct Flags {
    /// Directory that `run` got as --out
    #[arg(default_value = "evaluation")]
    directory: PathBuf,
}

impl Flags {
    pub fn run(&self) -> Result<()> {
        let outcomes = read_outcomes(self.directory.join(OUTCOMES))?;
        tables::write(&self.directory, &outcomes)?;
        tables::print(&outcomes)
    }
}
