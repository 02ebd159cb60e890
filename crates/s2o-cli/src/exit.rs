//! How an example ends: one line on stderr and exit code 1 for whatever went wrong.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// The exit code of `result`, its error said on stderr.
pub fn with(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let is_closed_pipe = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    // Whoever reads the output (`| head`) has seen enough.
    if error.chain().any(is_closed_pipe) {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}", one_line(&error));
    ExitCode::FAILURE
}

/// Writes to stdout, as an error rather than a panic when nobody reads it any more.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// The error and its causes. Candle puts a backtrace behind the first line of its messages, and transparent errors say
/// the same as their cause.
fn one_line(error: &anyhow::Error) -> String {
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
    line
}
