//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.
//!
//! [`tasks`] makes prompts of a given length from a seed, [`load`] reads the prompts of published benchmarks from
//! files, and [`score`] rates answers by the rules of each benchmark. All of them use [`tasks::Item`]. [`method`]
//! provides the attention methods by name. [`run`] runs items through a model with every method, and [`report`] makes
//! tables of the outcomes. [`capture`] gets queries, keys and values from a model or a file, and [`metrics`] measures
//! the error of an output. [`experiment`] runs the experiments of the paper on such tensors, and [`tune`] finds a
//! threshold for every layer. [`provenance`] records the machine, the commit and the command of measurements.

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
mod threads;
pub mod tune;

pub use error::{EvalError, Result};
pub use provenance::Provenance;
pub use threads::limit_threads;
