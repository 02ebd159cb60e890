//! [`Group`]: the ranks that work together.

use std::fmt;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use candle_core::DType;

use crate::frame::{Frame, Frames, HEADER, Header, Kind, Space};
use crate::life::{Failure, Life};
use crate::{CommError, Rendezvous, Result};

/// The most bytes of a message of [`Group::exchange`].
pub const MAX_MESSAGE: usize = 1 << 26;

/// Frames up to this many bytes are sent without a thread. They never wait for the receiver: the system keeps at least
/// 64 KiB for each connection, and a rank is at most one operation ahead of another.
const INLINE: usize = 8 << 10;

/// The ranks that work together. All ranks call the same functions in the same order.
///
/// Dropping it says goodbye to the other ranks, as [`leave`](Self::leave) does. A drop while the thread panics tells them
/// that this rank gave up.
pub struct Group {
    life: Arc<Life>,
    /// The number of operations so far. Its lock keeps operations of several threads apart.
    operations: Mutex<u64>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("rank", &self.rank()).field("world_size", &self.world_size()).finish()
    }
}

impl Group {
    /// Meets the other ranks and connects to each of them. One rank alone opens no connection.
    ///
    /// # Errors
    ///
    /// [`CommError::Size`] if the numbers are wrong; [`CommError::Address`], [`CommError::PortInUse`],
    /// [`CommError::Listen`], [`CommError::Unreachable`], [`CommError::NotARank`], [`CommError::Closed`] and
    /// [`CommError::Busy`] if the address does not lead to rank 0 of this run. On all ranks together
    /// [`CommError::Version`], [`CommError::WorldSize`], [`CommError::RankTwice`] and [`CommError::MissingRanks`] if not
    /// exactly the expected ranks come. [`CommError::Connect`] if two ranks cannot reach each other.
    pub fn join(rendezvous: &Rendezvous) -> Result<Arc<Self>> {
        let mesh = rendezvous.meet(env!("CARGO_PKG_VERSION"))?;
        let life = Arc::new(Life::new(rendezvous.rank, mesh));
        let threads = life.start()?;
        Ok(Arc::new(Self { life, operations: Mutex::new(0), threads: Mutex::new(threads) }))
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.life.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.life.mesh.data.len()
    }

    /// Sends a message to all ranks. Returns the messages of all ranks, in their order, this rank's own among them.
    ///
    /// # Errors
    ///
    /// [`CommError::Size`] for a message of more than [`MAX_MESSAGE`] bytes, [`CommError::OutOfStep`] if another rank
    /// makes another call, and the errors of [`check`](Self::check).
    pub fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.messages(Kind::Exchange, message)
    }

    /// Fails on all ranks unless all give the same text. `what` names it in errors, for example "the model".
    ///
    /// # Errors
    ///
    /// [`CommError::Disagree`] names the first rank that differs from rank 0. It is the same on all ranks, and the group
    /// stays usable. Otherwise as [`exchange`](Self::exchange); [`CommError::OutOfStep`] if `what` differs.
    pub fn agree(&self, what: &'static str, value: &str) -> Result<()> {
        let all = self.messages(Kind::Agree, format!("{what}\0{value}").as_bytes())?;
        let mut texts = all.iter().map(|message| String::from_utf8_lossy(message));
        let first = texts.next().unwrap_or_default();
        let Some((rank, other)) = texts.enumerate().find(|(_, text)| *text != first) else { return Ok(()) };
        let rank = rank + 1;
        match (first.split_once('\0'), other.split_once('\0')) {
            (Some((what_0, expected)), Some((what_i, got))) if what_0 == what_i => {
                Err(CommError::Disagree { what, rank, expected: expected.into(), got: got.into() })
            }
            _ => Err(self.out_of_step(rank, format!("agree on {first:?}"), format!("agree on {other:?}"))),
        }
    }

    /// Why the group ended, if it did. It ends when a rank is lost, gives up, or leaves while another makes a call. After
    /// that all calls fail.
    ///
    /// # Errors
    ///
    /// [`CommError::Lost`], [`CommError::GaveUp`] and [`CommError::Left`].
    pub fn check(&self) -> Result<()> {
        self.life.check()
    }

    /// Registers a function that is called once, from another thread, when a rank is lost or gives up: with
    /// [`CommError::Lost`], or [`CommError::GaveUp`] of another rank. It is called too if that happened already.
    ///
    /// A function that holds the group must hold it weakly: otherwise the group is never dropped. It must not wait for a
    /// thread that drops the group. A group that ends normally never calls the function.
    pub fn on_loss(&self, callback: impl FnOnce(&CommError) + Send + 'static) {
        self.life.on_loss(Box::new(callback));
    }

    /// Tells all ranks that this one cannot go on, and why. Calls that wait there for this rank end with
    /// [`CommError::GaveUp`]. Does nothing if the group ended already.
    pub fn abort(&self, reason: &str) {
        self.life.fail(Failure::GaveUp { rank: self.rank(), reason: reason.into() });
    }

    /// Says goodbye to the other ranks and waits for the threads of this group. All later calls fail.
    pub fn leave(&self) {
        self.life.leave();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        // A callback may leave the group or drop it: its thread cannot wait for itself, and the others end after it.
        if threads.iter().all(|thread| thread.thread().id() != thread::current().id()) {
            for thread in threads {
                // A panic there was reported by its thread.
                let _ = thread.join();
            }
        }
    }

    fn messages(&self, kind: Kind, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        if message.len() > MAX_MESSAGE {
            let got = format!("{} bytes", message.len());
            return Err(CommError::size("message", format!("at most {MAX_MESSAGE} bytes"), got));
        }
        let frames = Frames::Same(Frame::with([1, message.len()], message));
        let mut messages = vec![Vec::new(); self.world_size()];
        self.swap(kind, DType::U8, frames, messages.iter_mut().map(Space::Message).collect())?;
        messages[self.rank()] = message.to_vec();
        Ok(messages)
    }

    /// One operation: sends the frame of each rank and fills `spaces[i]` from rank i. That of this rank is not used.
    pub(crate) fn swap(&self, kind: Kind, dtype: DType, mut frames: Frames, mut spaces: Vec<Space>) -> Result<()> {
        let mut operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        self.life.ready()?;
        *operations += 1;
        let operation = *operations;
        frames.seal(operation, kind, dtype);
        // Each rank starts with the next one, so that not all send to rank 0 first.
        let peers = || (1..self.world_size()).map(|step| (self.rank() + step) % self.world_size());
        thread::scope(|scope| {
            let mut senders = Vec::new();
            let mut both = || {
                for peer in peers() {
                    let frame = frames.to(peer);
                    if frame.len() <= INLINE {
                        self.send(peer, frame)?;
                    } else {
                        // All ranks may send at once: none can wait to receive until it has sent.
                        let sender = thread::Builder::new().spawn_scoped(scope, move || self.send(peer, frame));
                        senders
                            .push(sender.map_err(|source| CommError::System { doing: "starting a thread", source })?);
                    }
                }
                for peer in peers() {
                    let shape = [0; 2];
                    self.receive(peer, Header { operation, kind, dtype, shape }, &mut spaces[peer])?;
                }
                Ok(())
            };
            let mut result: Result<()> = both();
            if let Err(error) = &result {
                // Ends the senders, too.
                self.abort(&error.to_string());
            }
            for sender in senders {
                let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result = result.and(sent);
            }
            result
        })
    }

    fn data(&self, peer: usize) -> Result<&TcpStream> {
        self.life.mesh.data[peer].as_ref().ok_or_else(|| self.life.broken(peer))
    }

    fn send(&self, peer: usize, bytes: &[u8]) -> Result<()> {
        self.data(peer)?.write_all(bytes).map_err(|_| self.life.broken(peer))
    }

    fn read(&self, peer: usize, buffer: &mut [u8]) -> Result<()> {
        self.data(peer)?.read_exact(buffer).map_err(|_| self.life.broken(peer))
    }

    /// Receives a frame from `peer`. `expected` lacks the shape, which `space` has.
    fn receive(&self, peer: usize, mut expected: Header, space: &mut Space) -> Result<()> {
        let mut header = [0; HEADER];
        self.read(peer, &mut header)?;
        let Some(got) = Header::decode(&header) else {
            return Err(self.out_of_step(peer, expected.to_string(), "bytes that are no header".into()));
        };
        expected.shape = match space {
            Space::Rows(shape, _) => shape.map(|n| n as u64),
            Space::Message(_) => [1, got.shape[1].min(MAX_MESSAGE as u64)],
        };
        if got != expected {
            return Err(self.out_of_step(peer, expected.to_string(), got.to_string()));
        }
        match space {
            Space::Rows(_, bytes) => self.read(peer, bytes),
            Space::Message(bytes) => {
                bytes.resize(got.shape[1] as usize, 0);
                self.read(peer, bytes)
            }
        }
    }

    /// Ends the group.
    fn out_of_step(&self, rank: usize, expected: String, got: String) -> CommError {
        let error = CommError::OutOfStep { rank, expected, got };
        self.abort(&error.to_string());
        error
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort("its thread panicked");
        }
        self.leave();
    }
}
