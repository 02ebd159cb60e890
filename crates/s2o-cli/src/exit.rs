//! The end of the program: an error is one line on stderr and exit code 1.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use s2o_comm::local;

/// The exit code of `result`; prints its error to stderr.
pub fn with(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Err(error) if !is_closed_pipe(&error) => local::exit(1, Some(&one_line(&error))),
        _ => ExitCode::SUCCESS,
    }
}

/// Whether the reader of the output went away (`| head`), which is not a failure.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let is_closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    error.chain().any(is_closed)
}

/// Writes to stdout; a closed pipe is an error, not a panic.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// Longest error in characters: some quote a file.
const LONGEST: usize = 2000;

/// The error and its causes on one line. Candle appends a backtrace to the first line of its messages, and transparent
/// errors repeat the text of their cause.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let text = text.lines().next().unwrap_or_default();
        if line.is_empty() {
            line = text.to_owned();
        } else if !line.contains(text) {
            line = format!("{line}: {text}");
        }
    }
    if let Some((end, _)) = line.char_indices().nth(LONGEST) {
        line.truncate(end);
        line.push_str(" ...");
    }
    line
}
