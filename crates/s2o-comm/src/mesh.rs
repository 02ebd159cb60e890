//! [`Mesh`]: two connections between each pair of ranks.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::handshake::{self, Fields, PATIENCE, Topic, remaining};
use crate::refusal::Refusal;
use crate::{CommError, Result};

/// The connections of a rank. The places of the rank itself are empty.
#[derive(Debug)]
pub(crate) struct Mesh {
    /// Carries the operations, by rank.
    pub data: Vec<Option<TcpStream>>,
    /// Carries heartbeats and errors, by rank: they must not wait behind data.
    pub life: Vec<Option<TcpStream>>,
}

/// What a rank knows when it starts to connect.
pub(crate) struct Plan<'a> {
    pub rank: usize,
    /// Chosen by rank 0: connections of another run do not have it.
    pub run: u64,
    pub listener: &'a TcpListener,
    /// Where each rank listens. Its length is the number of ranks.
    pub addresses: &'a [SocketAddr],
    pub timeout: Duration,
}

impl Mesh {
    /// Without connections.
    pub fn empty(world_size: usize) -> Self {
        let none = || (0..world_size).map(|_| None).collect();
        Self { data: none(), life: none() }
    }

    /// Connects to all lower ranks, then waits for all higher ones: a rank waits only for lower ones to go on, so that
    /// no two wait for each other.
    pub fn connect(plan: &Plan) -> Result<Self> {
        let deadline = Instant::now() + plan.timeout;
        let mut mesh = Self::empty(plan.addresses.len());
        for (peer, address) in plan.addresses.iter().enumerate().take(plan.rank) {
            for life in [false, true] {
                let stream = call(plan, address, life, deadline);
                let failed = |source| CommError::Connect { rank: peer, address: address.to_string(), source };
                *mesh.place(peer, life) = Some(stream.map_err(failed)?);
            }
        }
        loop {
            let missing = mesh.missing(plan.rank + 1);
            if missing.is_empty() {
                return Ok(mesh);
            }
            let Some(stream) = handshake::accept(plan.listener, deadline) else {
                return Err(CommError::MissingRanks { missing, timeout: plan.timeout });
            };
            // A connection that is none of a rank is dropped.
            if let Ok(Some((peer, life))) = answer(plan, &stream) {
                mesh.place(peer, life).get_or_insert(stream);
            }
        }
    }

    fn place(&mut self, rank: usize, life: bool) -> &mut Option<TcpStream> {
        if life { &mut self.life[rank] } else { &mut self.data[rank] }
    }

    /// The ranks above that lack a connection.
    fn missing(&self, from: usize) -> Vec<usize> {
        (from..self.data.len()).filter(|&rank| self.data[rank].is_none() || self.life[rank].is_none()).collect()
    }
}

/// Connects to a rank and says who calls.
fn call(plan: &Plan, address: &SocketAddr, life: bool, deadline: Instant) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, remaining(deadline)?)?;
    let mut content = plan.run.to_le_bytes().to_vec();
    content.extend((plan.rank as u32).to_le_bytes());
    content.push(u8::from(life));
    handshake::send(&stream, Topic::Peer, &content, deadline)?;
    match handshake::receive(&stream, deadline)? {
        (Topic::Peer, content) if content.is_empty() => prepare(&stream).map(|()| stream),
        _ => Err(io::Error::new(ErrorKind::InvalidData, "expected a rank of this run, got another program")),
    }
}

/// Reads who calls: `None` if it is no rank of this run that must call here.
fn answer(plan: &Plan, stream: &TcpStream) -> io::Result<Option<(usize, bool)>> {
    let deadline = Instant::now() + PATIENCE;
    let (topic, content) = handshake::receive(stream, deadline)?;
    if topic == Topic::Hello {
        // A rank of another run, which takes this rank for its rank 0.
        handshake::send(stream, Topic::Answer, &Refusal::Busy.encode(), deadline)?;
    }
    let mut fields = Fields(&content);
    let (run, rank, life) = (fields.u64(), fields.u32(), fields.byte());
    let rank = rank.map(|rank| rank as usize).filter(|rank| (plan.rank + 1..plan.addresses.len()).contains(rank));
    match (topic, rank, life) {
        (Topic::Peer, Some(rank), Some(life @ (0 | 1))) if run == Some(plan.run) => {
            handshake::send(stream, Topic::Peer, &[], deadline)?;
            prepare(stream)?;
            Ok(Some((rank, life == 1)))
        }
        _ => Ok(None),
    }
}

/// Sets a connection up for operations: small frames leave at once, and a call waits as long as it must.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(())
}
