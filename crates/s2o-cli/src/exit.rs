//! The end of the program: an error is one line on stderr and exit code 1.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use s2o_comm::local;

/// Whether a thread is ending the program.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// The exit code of `result`; prints its error to stderr.
pub fn with(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let is_closed_pipe = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    // A closed pipe (`| head`) is not a failure.
    if error.chain().any(is_closed_pipe) {
        return ExitCode::SUCCESS;
    }
    now(1, Some(&one_line(&error)))
}

/// Ends the program and the ranks that it started, from any thread and without waiting for a GPU: exit handlers of
/// libraries could wait for a rank that is gone. Only the first call has its message shown.
pub fn now(code: i32, message: Option<&str>) -> ! {
    if IS_ENDING.swap(true, Ordering::SeqCst) {
        loop {
            thread::park();
        }
    }
    local::end();
    if let Some(message) = message {
        eprintln!("error: {message}");
    }
    // SAFETY: `_exit` has no requirements; it runs nothing of this process any more.
    unsafe { libc::_exit(code) }
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
