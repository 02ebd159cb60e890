//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.
//!
//! [`tasks`] makes prompts of a wanted length from a seed, [`load`] reads those of published benchmarks from files, and
//! [`score`] says how good an answer is by the rules of each benchmark. All of them speak of one [`tasks::Item`].
//! [`method`] has the attention methods by name. [`run`] puts items to a model with every method, and [`report`] makes
//! tables of the outcomes. [`capture`] takes queries, keys and values out of a model or a file, [`metrics`] says how
//! far an output is from the exact one. [`experiment`] has the experiments of the paper on such tensors, and [`tune`]
//! finds a threshold for every layer. [`provenance`] records the machine, the commit and the command of measurements.

pub mod capture;
pub mod error;
pub mod experiment;
pub mod load;
pub mod method;
pub mod metrics;
pub mod provenance;
pub mod report;
pub mod run;
pub mod score;
pub mod tasks;
pub mod tune;

pub use error::{EvalError, Result};
pub use provenance::Provenance;
