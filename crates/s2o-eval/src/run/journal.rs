//! [`Journal`]: the outcomes of a run in a file that survives an interruption.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::outcome::{Key, Outcome};
use crate::error::{EvalError, Result};

/// Version of the format. It increases when older outcomes can no longer be compared with new ones.
pub const FORMAT_VERSION: u32 = 1;

const FORMAT: &str = "s2o-eval outcomes";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
}

fn header() -> Header {
    Header { format: FORMAT.to_owned(), version: FORMAT_VERSION }
}

/// Outcomes, one JSON object per line after a line with the format's version. Each outcome is written before the next
/// sample begins. The file is locked while the journal exists.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    outcomes: Vec<Outcome>,
}

impl Journal {
    /// Opens or creates the journal at `path`. A line that a killed run left unfinished is cut off.
    ///
    /// # Errors
    /// [`EvalError::OtherRun`] for a file of another format or version, or if another process writes to it;
    /// [`EvalError::MalformedLine`] for a complete line that is invalid or repeats an outcome; [`EvalError::Io`] and
    /// [`EvalError::Write`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let mut journal = Self::locked(path.as_ref())?;
        let mut contents = Vec::new();
        let reads = |source| EvalError::Io { path: journal.path.clone(), source };
        journal.file.read_to_end(&mut contents).map_err(reads)?;
        let (outcomes, bytes) = parse(&journal.path, &contents)?;
        journal.file.set_len(bytes as u64).map_err(|source| journal.write_failed(source))?;
        journal.file.seek(SeekFrom::End(0)).map_err(|source| journal.write_failed(source))?;
        if bytes == 0 {
            journal.write_line(&header())?;
        }
        journal.outcomes = outcomes;
        Ok(journal)
    }

    /// Creates a journal at `path` and overwrites an existing one.
    ///
    /// # Errors
    /// [`EvalError::OtherRun`] while another process writes to it; [`EvalError::Write`].
    pub fn fresh(path: impl AsRef<Path>) -> Result<Self> {
        let mut journal = Self::locked(path.as_ref())?;
        journal.file.set_len(0).map_err(|source| journal.write_failed(source))?;
        journal.write_line(&header())?;
        Ok(journal)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All outcomes, oldest first.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Adds an outcome.
    ///
    /// # Errors
    /// [`EvalError::Write`].
    pub fn append(&mut self, outcome: Outcome) -> Result<()> {
        self.write_line(&outcome)?;
        self.outcomes.push(outcome);
        Ok(())
    }

    fn locked(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|source| EvalError::Write { path: path.to_owned(), source })?;
        // Two runs would compute the same samples. On a file system without locks the user must prevent this.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(EvalError::OtherRun {
                path: path.to_owned(),
                expected: "a file that no other process writes to".to_owned(),
                got: "one in use".to_owned(),
            });
        }
        Ok(Self { path: path.to_owned(), file, outcomes: Vec::new() })
    }

    fn write_line(&mut self, value: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(value).map_err(|error| self.write_failed(error.into()))? + "\n";
        self.file.write_all(line.as_bytes()).map_err(|source| self.write_failed(source))
    }

    fn write_failed(&self, source: std::io::Error) -> EvalError {
        EvalError::Write { path: self.path.clone(), source }
    }
}

/// Reads the outcomes in a journal's file. A run may be writing to it.
///
/// # Errors
/// As [`Journal::open`].
pub fn read_outcomes(path: impl AsRef<Path>) -> Result<Vec<Outcome>> {
    let path = path.as_ref();
    let contents = std::fs::read(path).map_err(|source| EvalError::Io { path: path.to_owned(), source })?;
    Ok(parse(path, &contents)?.0)
}

/// The outcomes of the complete lines, and the bytes of these lines. An unfinished line may end inside a character.
fn parse(path: &Path, contents: &[u8]) -> Result<(Vec<Outcome>, usize)> {
    let bytes = contents.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let mut lines = contents[..bytes].split_inclusive(|&byte| byte == b'\n').map(<[u8]>::trim_ascii_end).enumerate();
    let header = lines.next().map_or(&contents[bytes..], |(_, line)| line);
    check_header(path, header, bytes > 0)?;
    let mut first_lines: HashMap<Key, usize> = HashMap::new();
    let mut outcomes = Vec::new();
    for (i, line) in lines {
        let line_number = i + 1;
        let malformed = |expected: &str, got: String| {
            Err(EvalError::MalformedLine {
                path: path.to_owned(),
                line: line_number,
                expected: expected.to_owned(),
                got,
            })
        };
        let outcome: Outcome = match serde_json::from_slice(line) {
            Ok(outcome) => outcome,
            Err(error) => return malformed("an outcome", error.to_string()),
        };
        if let Err((expected, got)) = outcome.check() {
            return malformed(expected, got);
        }
        if let Some(first) = first_lines.insert(outcome.key.clone(), line_number) {
            let Key { sample, method, .. } = &outcome.key;
            return malformed(
                "one outcome for each sample, method and setting",
                format!("a second one of {sample} with {method}, after line {first}"),
            );
        }
        outcomes.push(outcome);
    }
    Ok((outcomes, bytes))
}

/// An unfinished first line may be the beginning of a header but nothing else, so that other files are not overwritten.
fn check_header(path: &Path, line: &[u8], finished: bool) -> Result<()> {
    let current = serde_json::to_vec(&header()).unwrap_or_default();
    if line == current || (!finished && current.starts_with(line)) {
        return Ok(());
    }
    let got = match serde_json::from_slice::<Header>(line) {
        Ok(header) if header.format == FORMAT => format!("version {}", header.version),
        _ => "a file that is not a journal".to_owned(),
    };
    let expected = format!("{FORMAT} of version {FORMAT_VERSION}");
    Err(EvalError::OtherRun { path: path.to_owned(), expected, got })
}
