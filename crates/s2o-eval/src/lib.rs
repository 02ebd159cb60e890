//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.
//!
//! [`tasks`] makes prompts of a wanted length from a seed, [`load`] reads those of published benchmarks from files, and
//! [`score`] says how good an answer is by the rules of each benchmark. All of them speak of one [`tasks::Item`].
//! [`method`] has the attention methods by name, [`plot`] the pictures. [`run`] puts items to a model with every
//! method, and [`report`] makes tables of what came out.

pub mod error;
pub mod load;
pub mod method;
pub mod plot;
pub mod report;
pub mod run;
pub mod score;
pub mod tasks;

pub use error::{EvalError, Result};
