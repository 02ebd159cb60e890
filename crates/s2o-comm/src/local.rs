//! Ranks of a program: how it starts them on its host, and how all of them end when one fails.
//!
//! [`place`] tells a process its rank; [`start`] makes it the first of several, and the others run the same program with
//! the same arguments. [`join`] joins them. Each ends with [`fail`], or after its work, of which the first waits for the
//! others ([`wait`]).

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, io, iter, thread};

use crate::{CommError, Group, JOIN_TIMEOUT, Rendezvous, Result};

/// Environment variables that place a rank.
const RANK: &str = "S2O_RANK";
const WORLD_SIZE: &str = "S2O_WORLD_SIZE";
const RENDEZVOUS: &str = "S2O_RENDEZVOUS";
/// Set for a rank that [`start`] started.
const LAUNCHED: &str = "S2O_LAUNCHED";
/// Exit code of a rank that ends because another failed, whose error is shown.
const ENDED_WITH_OTHERS: i32 = 75;
/// Time from the end of a rank until its error is shown.
const SETTLE: Duration = Duration::from_millis(300);

/// How often the ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time that a rank takes to end after its work.
const LONGEST_END: Duration = Duration::from_secs(10);

/// Processes that must not outlive this one.
static RUNNING: Mutex<Vec<Rank>> = Mutex::new(Vec::new());
/// Whether a thread is ending this process.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Rank {
    number: usize,
    process: Child,
    stderr: Option<ChildStderr>,
}

/// The place of this process by the environment variables S2O_RANK, S2O_WORLD_SIZE and S2O_RENDEZVOUS (HOST:PORT of rank
/// 0); `None` without S2O_RENDEZVOUS.
///
/// # Errors
/// [`CommError::Size`] if a number is missing or no number.
pub fn place() -> Result<Option<Rendezvous>> {
    let Ok(address) = env::var(RENDEZVOUS) else { return Ok(None) };
    let number = |name: &'static str| {
        let got = env::var(name).unwrap_or_else(|_| "none".to_owned());
        let expected = format!("a number, as {RENDEZVOUS} is set");
        got.parse().map_err(|_| CommError::size(name, expected, got))
    };
    Ok(Some(Rendezvous { rank: number(RANK)?, world_size: number(WORLD_SIZE)?, address, timeout: JOIN_TIMEOUT }))
}

/// Starts ranks 1 and up with the arguments of this process, which is rank 0, and returns its place. Their output is not
/// shown. When one fails, this process ends with its message: the last line that it printed after `error: `.
///
/// # Errors
/// [`CommError::System`] if the system refuses a process, a thread or a port.
pub fn start(world_size: usize) -> Result<Rendezvous> {
    let system = |doing: &'static str| move |source: io::Error| CommError::System { doing, source };
    let program = env::current_exe().map_err(system("finding this program"))?;
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    // Taken again by rank 0 in a moment; should another program be faster, the error says that the port is in use.
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address = listener.map_err(system("finding a free port"))?.to_string();
    for number in 1..world_size {
        let mut command = Command::new(&program);
        command.args(&arguments).env(RANK, number.to_string()).env(WORLD_SIZE, world_size.to_string());
        command.env(RENDEZVOUS, &address).env(LAUNCHED, "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(system("starting a rank"))?;
        let stderr = process.stderr.take();
        running().push(Rank { number, process, stderr });
    }
    let watch = move || watch(world_size);
    thread::Builder::new().name("ranks".to_owned()).spawn(watch).map_err(system("watching the ranks"))?;
    Ok(Rendezvous { rank: 0, world_size, address, timeout: JOIN_TIMEOUT })
}

/// Joins the ranks. When another one is lost or gives up, this process ends with that error.
///
/// # Errors
/// Those of [`Group::join`].
pub fn join(rendezvous: &Rendezvous) -> Result<Arc<Group>> {
    let group = Group::join(rendezvous)?;
    group.on_loss(|error| end_with(error));
    Ok(group)
}

/// Ends this process with an error, whose text is `message`, and tells it to the other ranks. An error that began on
/// another rank is shown as that rank's.
pub fn fail(group: &Group, error: &(dyn std::error::Error + 'static), message: &str) -> ! {
    let mut causes = iter::successors(Some(error), |cause| cause.source());
    if let Some(error @ (CommError::Lost { .. } | CommError::Left { .. } | CommError::GaveUp { .. })) =
        causes.find_map(|cause| cause.downcast_ref())
    {
        end_with(error);
    }
    if group.check().is_ok() {
        group.abort(message);
        // Returns when the others were told.
        group.leave();
    }
    exit(1, Some(message))
}

/// Ends this process and the ranks that it started, from any thread and without waiting for a GPU: exit handlers of
/// libraries could wait for a rank that is gone. `message` is shown on stderr, after `error: `. Only the first call has an
/// effect.
pub fn exit(code: i32, message: Option<&str>) -> ! {
    if IS_ENDING.swap(true, Ordering::SeqCst) {
        loop {
            thread::park();
        }
    }
    end();
    if let Some(message) = message {
        eprintln!("error: {message}");
    }
    // SAFETY: `_exit` has no requirements; it runs nothing of this process any more.
    unsafe { libc::_exit(code) }
}

/// Ends this process because of another rank. A rank that [`start`] started shows nothing. The others first let come what
/// says more: an error of their own, or the message of a process that they started.
fn end_with(error: &CommError) -> ! {
    if env::var_os(LAUNCHED).is_some() {
        exit(ENDED_WITH_OTHERS, None);
    }
    thread::sleep(SETTLE);
    exit(1, Some(&error.to_string()))
}

/// Ends the ranks that still run.
fn end() {
    for mut rank in running().drain(..) {
        // It may have ended by itself.
        let _ = rank.process.kill();
        let _ = rank.process.wait();
    }
}

/// Waits until the ranks that this process started have ended by themselves; ends those that take longer than ten seconds.
pub fn wait() {
    let start = Instant::now();
    while !running().is_empty() && start.elapsed() < LONGEST_END {
        thread::sleep(LOOK);
    }
    end();
}

fn running() -> MutexGuard<'static, Vec<Rank>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(world_size: usize) {
    loop {
        let mut ranks = running();
        let ended = ranks.iter_mut().position(|rank| !matches!(rank.process.try_wait(), Ok(None)));
        let Some(mut rank) = ended.map(|place| ranks.remove(place)) else {
            if ranks.is_empty() {
                return;
            }
            drop(ranks);
            thread::sleep(LOOK);
            continue;
        };
        drop(ranks);
        match rank.process.wait() {
            Ok(status) if status.success() || status.code() == Some(ENDED_WITH_OTHERS) => {}
            status => {
                let error = rank.stderr.take().map(error_line).filter(|line| !line.is_empty());
                let error = error.unwrap_or_else(|| describe(status));
                exit(1, Some(&format!("rank {} of {world_size}: {error}", rank.number)));
            }
        }
    }
}

fn describe(status: io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => format!("it ended without a message ({status})"),
        Err(error) => format!("it cannot be waited for: {error}"),
    }
}

/// The error that a rank printed.
fn error_line(stderr: impl Read) -> String {
    let lines = BufReader::new(stderr).lines().map_while(std::result::Result::ok);
    lines.filter_map(|line| line.strip_prefix("error: ").map(str::to_owned)).last().unwrap_or_default()
}
