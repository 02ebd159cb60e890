//! The error type of this crate. Every variant says what was expected and what was found.

use std::path::PathBuf;

use s2o_baselines::BaselineError;
use s2o_models::ModelError;
use thiserror::Error;

/// An error of tasks, methods, runs or experiments.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvalError {
    /// No task or method has this name.
    #[error("`{got}` is not a {what}: expected one of {expected}")]
    Unknown {
        /// `task` or `method`.
        what: &'static str,
        /// The existing names, separated by commas.
        expected: String,
        /// The given name.
        got: String,
    },
    /// A method refuses an option.
    #[error("{method}: {reason}")]
    MethodOption {
        /// The method.
        method: String,
        /// The expected and the given value.
        reason: String,
    },
    /// The requested length cannot hold the task's question, needles and instructions.
    #[error("a prompt of {task} needs at least {expected} tokens with this tokenizer, got {got}")]
    ContextTooShort {
        /// The task.
        task: String,
        /// The smallest possible length in tokens.
        expected: usize,
        /// The requested length.
        got: usize,
    },
    /// The requested length, with template and answer, needs more positions than the model has.
    #[error("{task} of {tokens} tokens: expected at most {expected} positions, those of the model, got {got}")]
    ContextTooLong {
        /// The task.
        task: String,
        /// The requested length.
        tokens: usize,
        /// Positions of the model.
        expected: usize,
        /// Positions that the prompt needs, with template and answer.
        got: usize,
    },
    /// An argument is outside its range.
    #[error("{what}: expected {expected}, got {got}")]
    WrongInput {
        /// The argument.
        what: &'static str,
        /// The valid values.
        expected: String,
        /// The given value.
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
    /// A line of a data file does not follow its format.
    #[error("{}, line {line}: expected {expected}, got {got}", path.display())]
    MalformedLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The content that the format requires.
        expected: String,
        /// The content of the line.
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
    /// A run cannot continue this file of outcomes.
    #[error("{}: expected {expected}, got {got}", path.display())]
    OtherRun {
        /// The file.
        path: PathBuf,
        /// The content that this run would have written.
        expected: String,
        /// The content of the file.
        got: String,
    },
    /// The tokenizer cannot encode a text.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// The reason.
        reason: String,
    },
    /// A file of queries, keys and values is not a safetensors file.
    #[error("{} is not a valid safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file of queries, keys and values lacks a part.
    #[error("{}: {reason}", path.display())]
    TensorFile {
        /// The file.
        path: PathBuf,
        /// The expected and the actual content.
        reason: String,
    },
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

    pub(crate) fn unknown<'a>(what: &'static str, names: impl IntoIterator<Item = &'a str>, got: &str) -> Self {
        Self::Unknown { what, expected: names.into_iter().collect::<Vec<_>>().join(", "), got: got.to_owned() }
    }

    pub(crate) fn wrong(what: &'static str, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::WrongInput { what, expected: expected.into(), got: got.to_string() }
    }
}
