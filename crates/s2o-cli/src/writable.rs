//! Checks before the work that its results can be written after it. They leave no file and no change.

use std::fs::{self, OpenOptions};
use std::path::Path;

use anyhow::{Context, Result};

pub fn file(path: &Path) -> Result<()> {
    probe(path, path)
}

/// A directory that is made if it is missing.
pub fn directory(path: &Path) -> Result<()> {
    let there = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("."));
    probe(&there.join(format!(".s2o-{}", std::process::id())), path)
}

/// What an error of writing says.
pub fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Opens `file` for writing. Errors name `path`.
fn probe(file: &Path, path: &Path) -> Result<()> {
    let exists = file.exists();
    let describe = || cannot_write(path);
    OpenOptions::new().append(true).create(true).open(file).with_context(describe)?;
    if exists { Ok(()) } else { fs::remove_file(file).with_context(describe) }
}
