//! What a data connection carries: a header that says what follows, then the bytes.

use std::fmt;

use candle_core::DType;

use crate::element::SENT;

/// Bytes of a header.
pub(crate) const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"S2OD";

/// The call that sends. A sum takes two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Exchange,
    Agree,
    AllToAll,
    Parts,
    Sums,
}

const KINDS: [(Kind, &str); 5] = [
    (Kind::Exchange, "exchange"),
    (Kind::Agree, "agree"),
    (Kind::AllToAll, "all_to_all"),
    (Kind::Parts, "all_reduce, first step"),
    (Kind::Sums, "all_reduce, second step"),
];

/// What a frame holds. Ranks in step expect the headers that they get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Which operation of the group it is, from 1.
    pub operation: u64,
    pub kind: Kind,
    pub dtype: DType,
    /// Rows and elements per row; in a sum the elements of the whole tensor and those that follow.
    pub shape: [u64; 2],
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = KINDS.iter().position(|(kind, _)| *kind == self.kind).unwrap_or(usize::MAX) as u8;
        bytes[5] = SENT.iter().position(|dtype| *dtype == self.dtype).unwrap_or(usize::MAX) as u8;
        bytes[8..16].copy_from_slice(&self.operation.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.shape[0].to_le_bytes());
        bytes[24..].copy_from_slice(&self.shape[1].to_le_bytes());
        bytes
    }

    /// `None` if the bytes are no header.
    pub fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        let (kind, _) = KINDS.get(usize::from(bytes[4]))?;
        let dtype = SENT.get(usize::from(bytes[5]))?;
        (bytes[..4] == MAGIC).then(|| Self {
            operation: word(1),
            kind: *kind,
            dtype: *dtype,
            shape: [word(2), word(3)],
        })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(kind, _)| *kind == self.kind).map_or("", |(_, name)| name);
        let [rows, width] = self.shape;
        write!(f, "operation {}: {name} of {rows} x {width} {:?}", self.operation, self.dtype)
    }
}

/// What goes to one rank. The first [`HEADER`] bytes are room for the header, so that one call sends all.
#[derive(Debug)]
pub(crate) struct Frame {
    shape: [u64; 2],
    bytes: Vec<u8>,
}

impl Frame {
    /// A frame of rows and width without content.
    pub fn new(shape: [usize; 2]) -> Self {
        Self { shape: shape.map(|n| n as u64), bytes: vec![0; HEADER] }
    }

    /// A frame with content.
    pub fn with(shape: [usize; 2], content: &[u8]) -> Self {
        let mut frame = Self::new(shape);
        frame.bytes.extend_from_slice(content);
        frame
    }

    /// Where content is appended.
    pub fn content(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Writes the header.
    fn seal(&mut self, operation: u64, kind: Kind, dtype: DType) {
        let header = Header { operation, kind, dtype, shape: self.shape };
        self.bytes[..HEADER].copy_from_slice(&header.encode());
    }
}

/// What one operation sends.
#[derive(Debug)]
pub(crate) enum Frames {
    /// One frame per rank, in their order. That of the sender is not used.
    Each(Vec<Frame>),
    /// The same for all ranks.
    Same(Frame),
}

impl Frames {
    /// Writes the headers.
    pub fn seal(&mut self, operation: u64, kind: Kind, dtype: DType) {
        match self {
            Self::Each(frames) => frames.iter_mut().for_each(|frame| frame.seal(operation, kind, dtype)),
            Self::Same(frame) => frame.seal(operation, kind, dtype),
        }
    }

    /// All bytes to send to this rank.
    pub fn to(&self, rank: usize) -> &[u8] {
        match self {
            Self::Each(frames) => &frames[rank].bytes,
            Self::Same(frame) => &frame.bytes,
        }
    }
}

/// Where to put what comes from one rank.
#[derive(Debug)]
pub(crate) enum Space<'a> {
    /// Rows of a known number and width.
    Rows([usize; 2], &'a mut [u8]),
    /// One row of bytes, of a length that only the sender knows.
    Message(&'a mut Vec<u8>),
}
