//! Runs of samples through a model with every method, and their outcomes.
//!
//! A [`Sample`] is an item or a passage; a [`Grid`] makes samples of the generated tasks. [`Runner::run`] takes each
//! sample through all methods before the next sample, so that the outcomes of an interrupted run compare methods on the
//! same samples. A [`Journal`] stores every [`Outcome`] at once, and a run that opens it again computes only the rest.
//! [`Runner::plan`] counts what is left, and [`Plan::time`] estimates its time from a measured [`Speed`].
//!
//! ```no_run
//! use s2o_eval::run::{Grid, Journal, Runner};
//! use s2o_eval::tasks::ChatTemplate;
//! use s2o_models::{LoadOptions, ModelSource};
//!
//! # fn main() -> s2o_eval::Result<()> {
//! let model = ModelSource::Embedded.load(&LoadOptions::default(), None)?;
//! let runner = Runner::new(&model, ChatTemplate::None)?.specs(&["dense".parse()?, "s2o:tau=0.05".parse()?])?;
//! let samples = Grid { lengths: vec![4096], items: 10, ..Grid::default() }.samples(["passkey", "keyed_4"])?;
//! let mut journal = Journal::open("outcomes.jsonl")?;
//! let trials = runner.pending(&samples, &journal)?;
//! runner.run(&trials, &mut journal, &mut |_| {})?;
//! print!("{}", s2o_eval::report::markdown(journal.outcomes()));
//! # Ok(())
//! # }
//! ```

mod answers;
mod equal_density;
mod journal;
mod outcome;
mod passage;
mod plan;
mod runner;
mod sample;
mod speed;
#[cfg(test)]
mod tests;
mod trial;

pub use equal_density::{AtDensity, knob_prefills};
pub use journal::{FORMAT_VERSION, Journal, read_outcomes};
pub use outcome::{Key, Outcome, SampleResult, Setting};
pub use passage::Passage;
pub use plan::{Count, Memory, Plan};
pub use runner::{Event, Runner};
pub use sample::{GROUPS, Grid, Group, Sample, task_names};
pub use speed::{Speed, Time};
pub use trial::Trial;
