//! The one error type of this crate: every variant says what was expected and what was found.

use std::path::PathBuf;

use s2o_baselines::BaselineError;
use s2o_models::ModelError;
use thiserror::Error;

use crate::capture::TensorFileError;

/// What can go wrong while tasks are made or loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvalError {
    /// There is no task of this name.
    #[error("`{got}` is no task: expected one of {expected}")]
    UnknownTask {
        /// The names that exist, separated by commas.
        expected: String,
        /// The name that was given.
        got: String,
    },
    /// There is no method of this name.
    #[error("`{got}` is no method: expected one of {expected}")]
    UnknownMethod {
        /// The names that exist, separated by commas.
        expected: String,
        /// The name that was given.
        got: String,
    },
    /// A method refuses an option.
    #[error("{method}: {reason}")]
    MethodOption {
        /// The method.
        method: String,
        /// What was expected and what was got.
        reason: String,
    },
    /// The wanted length cannot hold the task's question, needles and instructions.
    #[error("a prompt of {task} needs at least {expected} tokens with this tokenizer, got {got}")]
    ContextTooShort {
        /// The task.
        task: String,
        /// The smallest possible length in tokens.
        expected: usize,
        /// The length asked for.
        got: usize,
    },
    /// An argument is outside its range.
    #[error("{what}: expected {expected}, got {got}")]
    WrongInput {
        /// The argument.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A line of a data file is not what its format asks for.
    #[error("{}, line {line}: expected {expected}, got {got}", path.display())]
    MalformedLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What the format asks for.
        expected: String,
        /// What the line holds.
        got: String,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file of outcomes is not one that this run can go on with.
    #[error("{}: expected {expected}, got {got}", path.display())]
    OtherRun {
        /// The file.
        path: PathBuf,
        /// What this run would have written.
        expected: String,
        /// What is there.
        got: String,
    },
    /// The tokenizer cannot encode a text.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// What went wrong.
        reason: String,
    },
    /// A layer that the model or the file lacks.
    #[error("layers: expected {expected}, got {got}")]
    NoSuchLayer {
        /// Those that exist.
        expected: String,
        /// The layer that was asked for.
        got: usize,
    },
    /// A file of queries, keys and values is not what it should be.
    #[error(transparent)]
    TensorFile(#[from] TensorFileError),
    /// A published method refuses its settings or the tensors.
    #[error(transparent)]
    Baseline(#[from] BaselineError),
    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An error of the model or of its embedded texts.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// `Result` with [`EvalError`].
pub type Result<T, E = EvalError> = std::result::Result<T, E>;

impl EvalError {
    pub(crate) fn tokenizer(reason: impl ToString) -> Self {
        Self::Tokenizer { reason: reason.to_string() }
    }

    pub(crate) fn unknown_task<'a>(names: impl IntoIterator<Item = &'a str>, got: &str) -> Self {
        let expected = names.into_iter().collect::<Vec<_>>().join(", ");
        Self::UnknownTask { expected, got: got.to_owned() }
    }
}
