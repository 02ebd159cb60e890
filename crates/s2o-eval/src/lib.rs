//! Long-context tasks, their scores, and the experiments of the S2O paper, for any attention method.
//!
//! [`tasks`] makes prompts of a wanted length from a seed, and
//! [`score`] says how good an answer is by the rules of each benchmark. All of them speak of one [`tasks::Item`].

pub mod error;
pub mod score;
pub mod tasks;

pub use error::{EvalError, Result};
