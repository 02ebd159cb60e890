//! Messages before a group exists: small, with a time limit, and from connections that need not be those of ranks.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

const MAGIC: [u8; 7] = *b"S2OCOMM";
/// How long a new connection may take to say what it is, and how long a rank waits longer than rank 0.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// How often a listener looks for a connection: waking every millisecond costs little, and joining is rare.
const POLL: Duration = Duration::from_millis(1);

/// What a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Topic {
    /// From a rank to rank 0.
    Hello = 1,
    /// From rank 0 to a rank.
    Answer = 2,
    /// From a rank to one of a lower number, which answers with an empty message of this topic.
    Peer = 3,
}

impl Topic {
    /// The most bytes of a message: nothing larger is received, whatever the sender says.
    fn limit(self) -> usize {
        match self {
            Self::Hello | Self::Peer => 256,
            // The addresses of all ranks.
            Self::Answer => 64 << 10,
        }
    }
}

/// Sends one message.
pub(crate) fn send(mut stream: &TcpStream, topic: Topic, content: &[u8], deadline: Instant) -> io::Result<()> {
    let mut bytes = MAGIC.to_vec();
    bytes.push(topic as u8);
    bytes.extend((content.len() as u32).to_le_bytes());
    bytes.extend(content);
    stream.set_write_timeout(Some(remaining(deadline)?))?;
    stream.write_all(&bytes)
}

/// Receives one message. [`ErrorKind::InvalidData`] if the bytes are none.
pub(crate) fn receive(stream: &TcpStream, deadline: Instant) -> io::Result<(Topic, Vec<u8>)> {
    let mut head = [0; 12];
    read_exact(stream, &mut head, deadline)?;
    let topics = [Topic::Hello, Topic::Answer, Topic::Peer];
    let topic = topics.into_iter().find(|&topic| topic as u8 == head[7]).filter(|_| head[..7] == MAGIC);
    let length = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
    let topic = topic.filter(|topic| length <= topic.limit()).ok_or(ErrorKind::InvalidData)?;
    let mut content = vec![0; length];
    read_exact(stream, &mut content, deadline)?;
    Ok((topic, content))
}

/// Reads all of `buffer` before the deadline, also from a sender that sends byte by byte.
fn read_exact(mut stream: &TcpStream, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time until `deadline`, or an error if it is over.
pub(crate) fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The next connection, or `None` at the deadline. The listener must not block.
pub(crate) fn accept(listener: &TcpListener, deadline: Instant) -> Option<TcpStream> {
    loop {
        // A connection that was given up meanwhile is an error too: only the deadline ends the wait.
        if let Ok((stream, _)) = listener.accept()
            && stream.set_nonblocking(false).is_ok()
        {
            return Some(stream);
        }
        thread::sleep(POLL.min(remaining(deadline).ok()?));
    }
}

/// Appends a text and its length.
pub(crate) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let length = text.len().min(usize::from(u16::MAX));
    bytes.extend((length as u16).to_le_bytes());
    bytes.extend(&text.as_bytes()[..length]);
}

/// Takes values off the front of a message. `None` if it ends too early.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    pub fn byte(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn text(&mut self) -> Option<String> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    }

    pub fn address(&mut self) -> Option<SocketAddr> {
        self.text()?.parse().ok()
    }
}

/// The address in place of one that no one can have.
pub(crate) fn no_address() -> SocketAddr {
    (Ipv4Addr::UNSPECIFIED, 0).into()
}
