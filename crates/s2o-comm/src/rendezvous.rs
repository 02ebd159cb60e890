//! [`Rendezvous`]: how the ranks find one another.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::handshake::{self, Fields, PATIENCE, Topic, no_address, put_text, remaining};
use crate::mesh::{Mesh, Plan};
use crate::refusal::Refusal;
use crate::{CommError, Result};

/// How long ranks usually wait for one another: long enough to start programs on several hosts by hand.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The most ranks of a group: the addresses of all fit in one message, and each rank has a thread for each other.
pub const MAX_WORLD_SIZE: usize = 256;

/// How often a rank tries to reach rank 0.
const RETRY: Duration = Duration::from_millis(50);

/// Where and how long the ranks of a group meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// This rank, from 0.
    pub rank: usize,
    /// The number of ranks, up to [`MAX_WORLD_SIZE`].
    pub world_size: usize,
    /// HOST:PORT where rank 0 listens until all ranks are there, the same for all ranks. If the name of the host does not
    /// lead to rank 0's network on rank 0 itself, give 0.0.0.0:PORT there. One rank alone ignores it.
    pub address: String,
    /// How long to wait for all ranks, and again for their connections. [`JOIN_TIMEOUT`] suits most.
    pub timeout: Duration,
}

impl Rendezvous {
    /// Meets the other ranks and connects to each. `version` is that of this crate.
    pub(crate) fn meet(&self, version: &str) -> Result<Mesh> {
        let (rank, world_size) = (self.rank, self.world_size);
        if !(1..=MAX_WORLD_SIZE).contains(&world_size) {
            return Err(CommError::size("world_size", format!("1 to {MAX_WORLD_SIZE}"), world_size));
        }
        if rank >= world_size {
            return Err(CommError::size("rank", format!("less than world_size, which is {world_size}"), rank));
        }
        if world_size == 1 {
            return Ok(Mesh::empty(1));
        }
        let addresses =
            resolve(&self.address).map_err(|source| CommError::Address { address: self.address.clone(), source })?;
        let deadline = Instant::now() + self.timeout;
        if rank == 0 { self.lead(version, &addresses, deadline) } else { self.follow(version, &addresses, deadline) }
    }

    /// The part of rank 0.
    fn lead(&self, version: &str, addresses: &[SocketAddr], deadline: Instant) -> Result<Mesh> {
        let listener = self.listen(addresses)?;
        let (arrivals, refusal) = self.gather(version, &listener, deadline);
        let run = RandomState::new().build_hasher().finish();
        let mut table = vec![no_address(); self.world_size];
        for (hello, _) in arrivals.iter().filter(|_| refusal.is_none()) {
            table[hello.rank] = hello.listener;
        }
        let answer = match &refusal {
            Some(refusal) => refusal.encode(),
            None => encode_table(run, &table),
        };
        for (_, stream) in &arrivals {
            // A rank that cannot be told is missed when the connections are made.
            let _ = handshake::send(stream, Topic::Answer, &answer, Instant::now() + PATIENCE);
        }
        match refusal {
            Some(refusal) => Err(refusal.error(&self.address, self.timeout)),
            None => {
                Mesh::connect(&Plan { rank: 0, run, listener: &listener, addresses: &table, timeout: self.timeout })
            }
        }
    }

    /// Listens at the first address that is one of this host.
    fn listen(&self, addresses: &[SocketAddr]) -> Result<TcpListener> {
        let address = || self.address.clone();
        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for at in addresses {
            match TcpListener::bind(at).and_then(|listener| listener.set_nonblocking(true).map(|()| listener)) {
                Ok(listener) => return Ok(listener),
                // Not the next address: the other ranks would reach the program at this one.
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    return Err(CommError::PortInUse { address: address() });
                }
                Err(error) => last = error,
            }
        }
        Err(CommError::Listen { address: address(), source: last })
    }

    /// Waits for the other ranks. After the first fault it goes on for [`PATIENCE`], so that all ranks hear of it.
    fn gather(
        &self,
        version: &str,
        listener: &TcpListener,
        mut deadline: Instant,
    ) -> (Vec<(Hello, TcpStream)>, Option<Refusal>) {
        let mut arrivals: Vec<(Hello, TcpStream)> = Vec::new();
        let mut refusal = None;
        while arrivals.len() + 1 < self.world_size || (refusal.is_some() && arrivals.len() < MAX_WORLD_SIZE) {
            let Some(stream) = handshake::accept(listener, deadline) else { break };
            // Bytes that are no hello come from a program that is no rank.
            let Some(hello) = Hello::receive(&stream) else { continue };
            let fault = self.fault(version, &hello, &arrivals);
            if fault.is_some() && refusal.is_none() {
                refusal = fault;
                deadline = deadline.min(Instant::now() + PATIENCE);
            }
            arrivals.push((hello, stream));
        }
        if refusal.is_none() && arrivals.len() + 1 < self.world_size {
            let came = |rank| arrivals.iter().any(|(hello, _)| hello.rank == rank);
            refusal = Some(Refusal::Missing((1..self.world_size).filter(|&rank| !came(rank)).collect()));
        }
        (arrivals, refusal)
    }

    /// Why a rank that says this cannot take part.
    fn fault(&self, version: &str, hello: &Hello, arrivals: &[(Hello, TcpStream)]) -> Option<Refusal> {
        let rank = hello.rank;
        if hello.version != version {
            return Some(Refusal::Version { rank, expected: version.into(), got: hello.version.clone() });
        }
        if hello.world_size != self.world_size {
            return Some(Refusal::WorldSize { rank, expected: self.world_size, got: hello.world_size });
        }
        // This process is rank 0.
        let twice = rank == 0 || arrivals.iter().any(|(other, _)| other.rank == rank);
        twice.then_some(Refusal::Twice { rank })
    }

    /// The part of every other rank.
    fn follow(&self, version: &str, addresses: &[SocketAddr], deadline: Instant) -> Result<Mesh> {
        let stream = self.reach(addresses, deadline)?;
        let system = |source| CommError::System { doing: "listening for other ranks", source };
        // Other ranks reach this one by the network that leads to rank 0.
        let local = stream.local_addr().map_err(system)?;
        let listener = TcpListener::bind(SocketAddr::new(local.ip(), 0)).map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let hello = Hello {
            version: version.into(),
            rank: self.rank,
            world_size: self.world_size,
            listener: listener.local_addr().map_err(system)?,
        };
        // Rank 0 began to listen before this rank reached it, so its time is over first and it answers.
        let deadline = Instant::now() + self.timeout + PATIENCE;
        let answer = handshake::send(&stream, Topic::Hello, &hello.encode(), deadline)
            .and_then(|()| handshake::receive(&stream, deadline));
        let closed = || CommError::Closed { address: self.address.clone() };
        let foreign = || CommError::NotARank { address: self.address.clone() };
        let content = match answer {
            Ok((Topic::Answer, content)) => content,
            Ok(_) => return Err(foreign()),
            Err(error) if error.kind() == ErrorKind::InvalidData => return Err(foreign()),
            Err(_) => return Err(closed()),
        };
        if let Some(refusal) = Refusal::decode(&content) {
            return Err(refusal.error(&self.address, self.timeout));
        }
        let (run, mut table) =
            decode_table(&content).filter(|(_, t)| t.len() == self.world_size).ok_or_else(foreign)?;
        // Rank 0 does not know by which of its addresses others reach it.
        table[0] = stream.peer_addr().map_err(system)?;
        let plan = Plan { rank: self.rank, run, listener: &listener, addresses: &table, timeout: self.timeout };
        Mesh::connect(&plan)
    }

    /// Connects to rank 0, which may start later.
    fn reach(&self, addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream> {
        let mut last = io::Error::from(ErrorKind::TimedOut);
        loop {
            for address in addresses {
                let Ok(left) = remaining(deadline) else { break };
                match TcpStream::connect_timeout(address, left) {
                    // With no listener there, the system may connect a socket to itself: then it is both ends.
                    Ok(stream) if stream.local_addr().ok() != stream.peer_addr().ok() => return Ok(stream),
                    Ok(_) => {}
                    Err(error) => last = error,
                }
            }
            let Ok(left) = remaining(deadline) else { break };
            thread::sleep(RETRY.min(left));
        }
        Err(CommError::Unreachable { address: self.address.clone(), timeout: self.timeout, source: last })
    }
}

fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<_> = address.to_socket_addrs()?.collect();
    match addresses.first() {
        Some(first) if first.port() > 0 => Ok(addresses),
        Some(_) => Err(io::Error::new(ErrorKind::InvalidInput, "port 0 names no port")),
        None => Err(io::Error::new(ErrorKind::NotFound, "the host has no address")),
    }
}

/// What a rank tells rank 0.
struct Hello {
    version: String,
    rank: usize,
    world_size: usize,
    listener: SocketAddr,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // The version first: what follows it may differ in another one.
        put_text(&mut bytes, &self.version);
        bytes.extend((self.rank as u32).to_le_bytes());
        bytes.extend((self.world_size as u32).to_le_bytes());
        put_text(&mut bytes, &self.listener.to_string());
        bytes
    }

    fn receive(stream: &TcpStream) -> Option<Self> {
        let (topic, content) = handshake::receive(stream, Instant::now() + PATIENCE).ok()?;
        let mut fields = Fields(&content);
        let hello = Self {
            version: fields.text()?,
            rank: fields.u32()? as usize,
            world_size: fields.u32()? as usize,
            listener: fields.address()?,
        };
        (topic == Topic::Hello && hello.rank < hello.world_size).then_some(hello)
    }
}

const TABLE: u8 = 0;

fn encode_table(run: u64, table: &[SocketAddr]) -> Vec<u8> {
    let mut bytes = vec![TABLE];
    bytes.extend(run.to_le_bytes());
    for address in table {
        put_text(&mut bytes, &address.to_string());
    }
    bytes
}

fn decode_table(bytes: &[u8]) -> Option<(u64, Vec<SocketAddr>)> {
    let mut fields = Fields(bytes);
    if fields.byte()? != TABLE {
        return None;
    }
    let run = fields.u64()?;
    let mut table = Vec::new();
    while !fields.0.is_empty() {
        table.push(fields.address()?);
    }
    Some((run, table))
}

#[cfg(test)]
mod tests {
    use s2o_testkit::ranks::free_address;

    use super::*;

    fn rendezvous(rank: usize, seconds: u64, address: &str) -> Rendezvous {
        Rendezvous { rank, world_size: 2, address: address.into(), timeout: Duration::from_secs(seconds) }
    }

    /// Two ranks of two builds: both name the version that differs from rank 0's.
    #[test]
    fn versions_differ() {
        let address = free_address();
        let join = |rank, version: &'static str| {
            let rendezvous = rendezvous(rank, 10, &address);
            thread::spawn(move || rendezvous.meet(version).unwrap_err())
        };
        for rank in [join(0, "1.2.3"), join(1, "1.2.4")] {
            let error = rank.join().unwrap();
            let CommError::Version { rank: 1, expected, got } = &error else { panic!("{error}") };
            assert_eq!((expected.as_str(), got.as_str()), ("1.2.3", "1.2.4"));
        }
    }

    /// A rank that meets rank 0 but then never connects, and one of another run that comes in between.
    #[test]
    fn another_run_and_an_absent_rank() {
        let address = free_address();
        let first = rendezvous(0, 2, &address);
        let first = thread::spawn(move || first.meet("1").unwrap_err());
        let deadline = Instant::now() + Duration::from_secs(5);
        let absent = rendezvous(1, 5, &address);
        let stream = absent.reach(&resolve(&address).unwrap(), deadline).unwrap();
        let hello = Hello { version: "1".into(), rank: 1, world_size: 2, listener: no_address() };
        handshake::send(&stream, Topic::Hello, &hello.encode(), deadline).unwrap();
        let (_, answer) = handshake::receive(&stream, deadline).unwrap();
        let (run, table) = decode_table(&answer).unwrap();
        assert_eq!(table, [no_address(); 2]);

        let error = rendezvous(1, 5, &address).meet("1").unwrap_err();
        assert!(matches!(error, CommError::Busy { .. }), "{error}");

        // Calls as rank 1 of another run, as a rank that must not call, and as neither data nor life.
        for (run, rank, life) in [(run ^ 1, 1_u32, 0), (run, 0, 0), (run, 2, 0), (run, 1, 2)] {
            let stream = TcpStream::connect(&address).unwrap();
            let content = [run.to_le_bytes().as_slice(), &rank.to_le_bytes(), &[life]].concat();
            handshake::send(&stream, Topic::Peer, &content, deadline).unwrap();
            handshake::receive(&stream, deadline).unwrap_err();
        }
        let error = first.join().unwrap();
        assert!(matches!(&error, CommError::MissingRanks { missing, .. } if *missing == [1]), "{error}");
    }
}
