//! [`CommError`]: why a call was refused or failed.

use std::io;
use std::time::Duration;

use candle_core::DType;
use thiserror::Error;

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, CommError>;

/// Why a call was refused or failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum CommError {
    /// A size or a count does not fit the call.
    #[error("{name}: expected {expected}, got {got}")]
    Size { name: &'static str, expected: String, got: String },
    /// The operation does not take these elements.
    #[error("{name}: expected dtype {expected}, got {got:?}; convert with to_dtype")]
    DType { name: &'static str, expected: &'static str, got: DType },
    /// TCP sends from host memory.
    #[error("{name}: expected a tensor on the CPU, got one elsewhere; move it with to_device(&Device::Cpu)")]
    NotOnCpu { name: &'static str },
    /// NCCL sends from the memory of the GPU with which the rank joined.
    #[error("{name}: expected the NVIDIA GPU of this rank, got another device")]
    NotOnGpu { name: &'static str },
    /// NCCL cannot be loaded.
    #[error(
        "NCCL: {reason}; install it on every host (libnccl2 of NVIDIA's repository, or the Python package nvidia-nccl) \
         and add its directory to LD_LIBRARY_PATH"
    )]
    NoNccl { reason: String },
    /// NCCL failed.
    #[error("NCCL, {doing}: {reason}; NCCL_DEBUG=WARN says more")]
    Nccl { doing: &'static str, reason: String },
    /// The memory for the rows to receive is not there.
    #[error("expected {bytes} bytes of host memory for the rows to receive, got none; send fewer rows in one call")]
    Memory { bytes: usize },

    /// The address of the rendezvous means nothing.
    #[error("{address}: expected HOST:PORT of rank 0, with a known host and a port above 0, got an error: {source}")]
    Address { address: String, source: io::Error },
    /// Another program listens where rank 0 must.
    #[error("{address}: expected a free port, got one in use; stop the other run or choose another port")]
    PortInUse { address: String },
    /// Rank 0 cannot listen.
    #[error("{address}: rank 0 cannot listen there: {source}; expected an address of its own host, or 0.0.0.0:PORT")]
    Listen { address: String, source: io::Error },
    /// No one listens where rank 0 should.
    #[error("{address}: no rank 0 within {timeout:?}: {source}; start rank 0, or check the address and the firewall")]
    Unreachable { address: String, timeout: Duration, source: io::Error },
    /// The program at the address speaks something else.
    #[error("{address}: expected rank 0 of this program, got another program; choose another port")]
    NotARank { address: String },
    /// Rank 0 closed the connection before it answered.
    #[error("{address}: rank 0 closed the connection without an answer: it ended, or it belongs to another run")]
    Closed { address: String },
    /// Another run uses the address.
    #[error("{address}: expected rank 0 of this run, got that of another run; choose another port")]
    Busy { address: String },
    /// A rank has another version of this crate.
    #[error("rank {rank}: expected s2o-comm {expected} as on rank 0, got {got}; run one build on all ranks")]
    Version { rank: usize, expected: String, got: String },
    /// A rank counts the ranks otherwise.
    #[error("rank {rank}: expected world_size {expected} as on rank 0, got {got}; start all ranks with one world_size")]
    WorldSize { rank: usize, expected: usize, got: usize },
    /// A rank came twice.
    #[error("rank {rank}: expected once, got twice; number the ranks from 0, and give every run its own port")]
    RankTwice { rank: usize },
    /// Ranks did not come in time.
    #[error("expected all ranks within {timeout:?}, got none of rank {missing:?}; start them, or read their errors")]
    MissingRanks { missing: Vec<usize>, timeout: Duration },
    /// A rank that came to the rendezvous cannot be reached.
    #[error("rank {rank} at {address}: {source}; ranks must reach one another at any port")]
    Connect { rank: usize, address: String, source: io::Error },
    /// The system refused a socket or a thread.
    #[error("{doing}: {source}")]
    System { doing: &'static str, source: io::Error },

    /// The process of a rank ended without a goodbye, or did not answer for [`LOST_AFTER`](crate::LOST_AFTER).
    #[error("rank {rank} was lost: it ended or did not answer; read its output, then start all ranks again")]
    Lost { rank: usize },
    /// A rank left the group while this one needed it.
    #[error("rank {rank} left the group before this call; read its output")]
    Left { rank: usize },
    /// A rank found an error and told the others.
    #[error("rank {rank} gave up: {reason}")]
    GaveUp { rank: usize, reason: String },
    /// The ranks do not make the same calls with matching arguments.
    #[error("rank {rank} is out of step: expected {expected}, got {got}; all ranks must make the same calls in order")]
    OutOfStep { rank: usize, expected: String, got: String },
    /// The ranks do not mean the same thing.
    #[error("{what}: expected {expected:?} on rank {rank} as on rank 0, got {got:?}")]
    Disagree { what: &'static str, rank: usize, expected: String, got: String },

    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl CommError {
    pub(crate) fn size(name: &'static str, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::Size { name, expected: expected.into(), got: got.to_string() }
    }
}

#[cfg(feature = "cuda")]
impl From<s2o_cuda::CudaError> for CommError {
    fn from(error: s2o_cuda::CudaError) -> Self {
        Self::Candle(error.into())
    }
}

impl From<CommError> for candle_core::Error {
    fn from(error: CommError) -> Self {
        match error {
            CommError::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}
