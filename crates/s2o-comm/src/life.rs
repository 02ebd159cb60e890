//! [`Life`]: which ranks are there, and the threads that watch them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::mesh::Mesh;
use crate::{CommError, Result};

/// The silence after which a rank counts as lost: its process is stopped, or its host or network is gone. A process that
/// ends is noticed at once.
pub const LOST_AFTER: Duration = Duration::from_secs(10);

/// How often a rank says that it is there.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How long the cause of a broken connection may take to arrive on another one.
const CAUSE_WITHIN: Duration = Duration::from_secs(2);
/// The most bytes of a reason that are sent.
const REASON: usize = 1024;

// The messages of a life connection: one byte each, and after FAILURE the rank, what happened to it and a text.
const BEAT: u8 = 1;
const GOODBYE: u8 = 2;
const FAILURE: u8 = 3;

/// Why a group ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    Lost { rank: usize },
    Left { rank: usize },
    GaveUp { rank: usize, reason: String },
}

impl Failure {
    pub fn error(&self) -> CommError {
        match self.clone() {
            Self::Lost { rank } => CommError::Lost { rank },
            Self::Left { rank } => CommError::Left { rank },
            Self::GaveUp { rank, reason } => CommError::GaveUp { rank, reason },
        }
    }

    fn encode(&self) -> Vec<u8> {
        let (rank, what, reason) = match self {
            Self::Lost { rank } => (*rank, 0, ""),
            Self::Left { rank } => (*rank, 1, ""),
            Self::GaveUp { rank, reason } => (*rank, 2, reason.as_str()),
        };
        let reason = &reason.as_bytes()[..reason.len().min(REASON)];
        let mut bytes = vec![FAILURE, what];
        bytes.extend((rank as u16).to_le_bytes());
        bytes.extend((reason.len() as u16).to_le_bytes());
        bytes.extend(reason);
        bytes
    }

    /// Reads what follows the byte FAILURE.
    fn read(mut life: &TcpStream, world_size: usize) -> io::Result<Self> {
        let mut head = [0; 5];
        life.read_exact(&mut head)?;
        let [what, r0, r1, l0, l1] = head;
        let rank = usize::from(u16::from_le_bytes([r0, r1]));
        let mut reason = vec![0; usize::from(u16::from_le_bytes([l0, l1])).min(REASON)];
        life.read_exact(&mut reason)?;
        match what {
            _ if rank >= world_size => Err(ErrorKind::InvalidData.into()),
            0 => Ok(Self::Lost { rank }),
            1 => Ok(Self::Left { rank }),
            2 => Ok(Self::GaveUp { rank, reason: String::from_utf8_lossy(&reason).into_owned() }),
            _ => Err(ErrorKind::InvalidData.into()),
        }
    }
}

type Callback = Box<dyn FnOnce(&CommError) + Send>;

#[derive(Default)]
struct State {
    /// The first failure: it stays.
    failure: Option<Failure>,
    /// Which ranks said goodbye.
    left: Vec<bool>,
    /// This rank says goodbye.
    leaving: bool,
    callbacks: Vec<Callback>,
}

/// What the calls and the watching threads of a rank share.
pub(crate) struct Life {
    pub rank: usize,
    pub mesh: Mesh,
    state: Mutex<State>,
    changed: Condvar,
}

impl Life {
    pub fn new(rank: usize, mesh: Mesh) -> Self {
        let state = State { left: vec![false; mesh.data.len()], ..State::default() };
        Self { rank, mesh, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Starts a thread that speaks to all ranks and, for each other rank, one that listens to it. They end after
    /// [`leave`](Self::leave).
    pub fn start(self: &Arc<Self>) -> Result<Vec<JoinHandle<()>>> {
        // Without the thread that speaks, those that listen end with their connections.
        self.start_all().inspect_err(|_| shut(&self.mesh.life, Shutdown::Both))
    }

    fn start_all(self: &Arc<Self>) -> Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        for (rank, stream) in self.mesh.life.iter().enumerate() {
            if stream.is_some() {
                let life = Arc::clone(self);
                threads.push(spawn("s2o-comm listen", move || life.listen(rank))?);
            }
        }
        if !threads.is_empty() {
            let life = Arc::clone(self);
            threads.push(spawn("s2o-comm speak", move || life.speak())?);
        }
        Ok(threads)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of the state is one assignment: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The failure that ended the group, if one did.
    pub fn check(&self) -> Result<()> {
        self.state().failure.as_ref().map_or(Ok(()), |failure| Err(failure.error()))
    }

    /// Fails if the next operation cannot succeed.
    pub fn ready(&self) -> Result<()> {
        self.check()?;
        let state = self.state();
        let gone = if state.leaving { Some(self.rank) } else { state.left.iter().position(|&left| left) };
        drop(state);
        gone.map_or(Ok(()), |rank| Err(self.fail(Failure::Left { rank })))
    }

    /// Ends the group, unless it ended already: returns the error of the first failure.
    pub fn fail(&self, failure: Failure) -> CommError {
        let mut state = self.state();
        let error = state.failure.get_or_insert(failure).error();
        drop(state);
        self.changed.notify_all();
        // Calls that wait for data end.
        shut(&self.mesh.data, Shutdown::Both);
        error
    }

    /// Ends the group because the connection to `rank` broke: returns why it did.
    pub fn broken(&self, rank: usize) -> CommError {
        let known = |state: &mut State| state.failure.is_none() && !state.left[rank] && !state.leaving;
        let (state, _) = self
            .changed
            .wait_timeout_while(self.state(), CAUSE_WITHIN, |state| known(state))
            .unwrap_or_else(PoisonError::into_inner);
        let failure = match () {
            () if state.leaving => Failure::Left { rank: self.rank },
            () if state.left[rank] => Failure::Left { rank },
            () => Failure::Lost { rank },
        };
        drop(state);
        self.fail(failure)
    }

    pub fn on_loss(&self, callback: Callback) {
        self.state().callbacks.push(callback);
        self.changed.notify_all();
    }

    /// Lets the threads say goodbye and end.
    pub fn leave(&self) {
        self.state().leaving = true;
        self.changed.notify_all();
    }

    /// Listens to one rank until it leaves, is lost, or this rank leaves.
    fn listen(&self, rank: usize) {
        let Some(mut stream) = self.mesh.life[rank].as_ref() else { return };
        let lost = |_: io::Error| Failure::Lost { rank };
        // Without a limit a silent rank would never count as lost.
        let mut heard = stream.set_read_timeout(Some(LOST_AFTER)).map_err(lost);
        while heard.is_ok() {
            let mut byte = [0];
            heard = match stream.read_exact(&mut byte).map(|()| byte[0]) {
                Ok(BEAT) => Ok(()),
                Ok(GOODBYE) => {
                    self.state().left[rank] = true;
                    self.changed.notify_all();
                    // What it sent can still be read. Nothing more can be sent to it.
                    shut(&self.mesh.data[rank..=rank], Shutdown::Write);
                    return;
                }
                Ok(FAILURE) => match Failure::read(stream, self.mesh.life.len()) {
                    Ok(failure) => {
                        self.fail(failure);
                        Ok(())
                    }
                    Err(error) => Err(lost(error)),
                },
                Ok(_) => Err(Failure::Lost { rank }),
                Err(error) => Err(lost(error)),
            };
        }
        if let Err(failure) = heard
            && !self.state().leaving
        {
            self.fail(failure);
        }
    }

    /// Tells the other ranks every second that this one is there, and passes on failures. Calls the callbacks.
    fn speak(&self) {
        let mut next_beat = Instant::now();
        let mut told = false;
        for stream in self.mesh.life.iter().flatten() {
            // A rank that does not take the few bytes is lost soon, and must not stop the words to others for long.
            let _ = stream.set_write_timeout(Some(BEAT_EVERY));
        }
        loop {
            let mut state = self.state();
            let wait = next_beat.saturating_duration_since(Instant::now());
            (state, _) = self
                .changed
                .wait_timeout_while(state, wait, |state| {
                    let failed = state.failure.is_some() && !(told && state.callbacks.is_empty());
                    !(failed || state.leaving)
                })
                .unwrap_or_else(PoisonError::into_inner);
            let (failure, leaving) = (state.failure.clone(), state.leaving);
            let callbacks = if failure.is_some() { std::mem::take(&mut state.callbacks) } else { Vec::new() };
            drop(state);
            if let Some(failure) = &failure {
                if !told {
                    self.tell(&failure.encode());
                    told = true;
                }
                if self.is_loss(failure) {
                    for callback in callbacks {
                        // A callback that panics must not end the thread that says goodbye.
                        let _ = catch_unwind(AssertUnwindSafe(|| callback(&failure.error())));
                    }
                }
            }
            if leaving {
                self.tell(&[GOODBYE]);
                shut(&self.mesh.data, Shutdown::Both);
                shut(&self.mesh.life, Shutdown::Both);
                return;
            }
            if Instant::now() >= next_beat {
                self.tell(&[BEAT]);
                next_beat = Instant::now() + BEAT_EVERY;
            }
        }
    }

    /// Whether another rank failed, in contrast to this one, or to one that left normally.
    fn is_loss(&self, failure: &Failure) -> bool {
        match failure {
            Failure::Lost { .. } => true,
            Failure::Left { .. } => false,
            Failure::GaveUp { rank, .. } => *rank != self.rank,
        }
    }

    /// Sends to all ranks. Those that do not hear it are noticed by the thread that listens to them.
    fn tell(&self, bytes: &[u8]) {
        for mut stream in self.mesh.life.iter().flatten() {
            let _ = stream.write_all(bytes);
        }
    }
}

fn shut(streams: &[Option<TcpStream>], how: Shutdown) {
    for stream in streams.iter().flatten() {
        // An error says that it is closed already.
        let _ = stream.shutdown(how);
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = thread::Builder::new().name(name.into()).spawn(run);
    thread.map_err(|source| CommError::System { doing: "starting a thread", source })
}
