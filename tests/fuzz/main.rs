//! Mutated models, tokenizers, configurations, task files and journals: every one must be read or refused with a
//! message. A panic, an abort, a hang or an output that is not a number fails, and so does a file that is read as
//! something else, unless its changes are only those that `allowed.rs` lists.
//!
//! ```text
//! cargo test --release --test fuzz                                        # 900 files, about 8 s
//! cargo test --release --test fuzz -- --files 5000 --seed 1000 --show     # and what each was read as
//! ```

mod allowed;
#[allow(dead_code, reason = "shared with the tests of the models")]
#[path = "../models/fixtures.rs"]
mod fixtures;
mod mutation;
mod originals;
mod reader;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use clap::Parser;
use rayon::prelude::*;
use s2o_testkit::uniform;

use mutation::mutate;
use originals::Original;

/// Memory and time of the reader of one file. The original files need 0.1 GiB and 0.1 s.
const MEMORY_KIB: u32 = 8 << 20;
const SECONDS: u64 = 30;

/// Reads mutated files.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of mutated files, of all kinds together.
    #[arg(long, default_value = "900")]
    files: usize,
    /// First seed.
    #[arg(long, default_value = "0")]
    seed: u64,
    /// List the files that are read differently from their original, and the messages of the refused.
    #[arg(long)]
    show: bool,
    /// Keep the files that fail in this directory.
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Names and flags for other tests.
    #[arg(hide = true, allow_hyphen_values = true)]
    filters: Vec<String>,
}

/// What a reader did with a file.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// It read the same content as in the original.
    Same,
    /// It read what it may read.
    Differs,
    Refused(String),
    Failed(String),
}

fn main() -> ExitCode {
    let given: Vec<String> = env::args().collect();
    if let [_, word, kind, path] = &given[..]
        && word == reader::WORD
    {
        return reader::read(kind, Path::new(path));
    }
    let arguments = Arguments::parse();
    mutation::check();
    allowed::check();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let originals = originals::write(directory.path());
    let digests: Vec<String> = originals.iter().map(|original| digest_of(original, directory.path())).collect();
    let verdicts: Vec<(usize, u64, String, Verdict)> = (0..arguments.files)
        .into_par_iter()
        .map(|i| {
            let (kind, seed) = (i % originals.len(), arguments.seed + i as u64);
            let (what, verdict) = try_one(&originals[kind], &digests[kind], seed, &arguments, directory.path());
            (kind, seed, what, verdict)
        })
        .collect();
    report(originals, &verdicts, arguments.show)
}

/// What the reader prints for an original. It must be read.
fn digest_of(original: &Original, directory: &Path) -> String {
    match run_reader(original.kind, &directory.join(original.name)) {
        (Some(0), stdout, _) => stdout,
        other => panic!("{}: expected the original to be read, got {other:?}", original.name),
    }
}

fn try_one(original: &Original, digest: &str, seed: u64, arguments: &Arguments, directory: &Path) -> (String, Verdict) {
    let place = directory.join(format!("{seed}"));
    let before = original.bytes(directory);
    let (bytes, what) = mutate(&before, original.format, &mut uniform(seed));
    original.write_mutated(directory, &place, &bytes);
    let (code, stdout, stderr) = run_reader(original.kind, &place);
    let is_harmless = |rest: Vec<u8>| {
        let place = place.join("rest");
        original.write_mutated(directory, &place, &rest);
        run_reader(original.kind, &place).1 == digest
    };
    let verdict = match code {
        Some(0) if stdout == digest => Verdict::Same,
        Some(0) => match allowed::forbidden(original.file, original.format, &before, &bytes) {
            places if places.is_empty() => Verdict::Differs,
            _ if allowed::without_allowed(original.file, &before, &bytes).is_some_and(is_harmless) => Verdict::Differs,
            places => Verdict::Failed(format!("read as something else, with changes in {}", places.join(", "))),
        },
        Some(1) if !stderr.trim().is_empty() => Verdict::Refused(stderr),
        code => Verdict::Failed(format!("exit code {code:?}: {}", stderr.trim())),
    };
    match (&verdict, &arguments.keep) {
        (Verdict::Failed(_), Some(keep)) => {
            fs::create_dir_all(keep).expect("a directory to keep files in");
            fs::write(keep.join(format!("{}-{seed}", original.file.replace('/', "-"))), &bytes).expect("written");
        }
        _ => fs::remove_dir_all(&place).expect("removed"),
    }
    (what, verdict)
}

/// Exit code (`None` after a signal or too much time), stdout and stderr of a reader with limited memory.
fn run_reader(kind: &str, path: &Path) -> (Option<i32>, String, String) {
    let program = env::current_exe().expect("this program");
    // Files, because a pipe that nobody reads blocks the reader.
    let stream = |name: &str| path.with_extension(name);
    let to = |name: &str| File::create(stream(name)).expect("a file for the output");
    let limit = format!("ulimit -v {MEMORY_KIB} && exec \"$0\" \"$@\"");
    let mut child = Command::new("sh")
        .args(["-c", &limit])
        .args([program.as_os_str(), reader::WORD.as_ref(), kind.as_ref(), path.as_os_str()])
        .envs([("RAYON_NUM_THREADS", "1"), ("RUST_BACKTRACE", "0")])
        .stdin(Stdio::null())
        .stdout(to("out"))
        .stderr(to("err"))
        .spawn()
        .expect("the reader starts");
    let start = Instant::now();
    let code = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break status.code(),
            None if start.elapsed() > Duration::from_secs(SECONDS) => {
                child.kill().expect("killed");
                break None;
            }
            None => thread::sleep(Duration::from_millis(2)),
        }
    };
    let text = |name: &str| {
        let bytes = fs::read(stream(name)).expect("the output");
        fs::remove_file(stream(name)).expect("removed");
        String::from_utf8_lossy(&bytes).into_owned()
    };
    (code, text("out"), text("err"))
}

fn report(originals: &[Original], verdicts: &[(usize, u64, String, Verdict)], show: bool) -> ExitCode {
    println!("{:32} {:>6} {:>6} {:>8} {:>8} {:>7}", "file", "tried", "same", "refused", "differs", "failed");
    for (kind, original) in originals.iter().enumerate() {
        let own: Vec<&Verdict> = verdicts.iter().filter(|row| row.0 == kind).map(|row| &row.3).collect();
        let count = |is: fn(&Verdict) -> bool| own.iter().filter(|verdict| is(verdict)).count();
        println!(
            "{:32} {:>6} {:>6} {:>8} {:>8} {:>7}",
            original.file,
            own.len(),
            count(|verdict| *verdict == Verdict::Same),
            count(|verdict| matches!(verdict, Verdict::Refused(_))),
            count(|verdict| *verdict == Verdict::Differs),
            count(|verdict| matches!(verdict, Verdict::Failed(_)))
        );
    }
    let mut failures = 0;
    for (kind, seed, what, verdict) in verdicts {
        let name = originals[*kind].file;
        match verdict {
            Verdict::Failed(how) => {
                failures += 1;
                println!("FAILED {name}, seed {seed}, {what}: {how}");
            }
            Verdict::Differs if show => println!("differs {name}, seed {seed}, {what}"),
            Verdict::Refused(message) if show => println!("refused {name}, seed {seed}, {what}: {}", message.trim()),
            _ => {}
        }
    }
    println!("{} files, {failures} failed", verdicts.len());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
