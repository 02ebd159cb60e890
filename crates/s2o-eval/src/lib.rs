//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.
//!
//! [`tasks`] makes prompts of a wanted length from a seed, [`load`] reads those of published benchmarks from files, and
//! [`score`] says how good an answer is by the rules of each benchmark. All of them speak of one [`tasks::Item`].
//! [`method`] has the attention methods by name, [`plot`] the pictures. [`run`] puts items to a model with every
//! method, and [`report`] makes tables of what came out. [`capture`] takes queries, keys and values out of a model or a
//! file, [`metrics`] says how far an output is from the exact one. [`experiment`] has the experiments of the paper on
//! such tensors, and [`tune`] finds a threshold for every layer. [`gallery`] makes pages of pictures and tables from rows.

pub mod capture;
pub mod error;
pub mod experiment;
pub mod gallery;
pub mod load;
pub mod method;
pub mod metrics;
pub mod plot;
pub mod report;
pub mod run;
pub mod score;
pub mod tasks;
pub mod tune;

pub use error::{EvalError, Result};
