//! Communication between the ranks of a parallel decoder, on Candle tensors. A rank is one process, or in tests one
//! thread.
//!
//! [`Group::join`] finds the other ranks and connects every pair of them. A [`Group`] sends small messages of the host and
//! notices when a rank is lost. A [`Communicator`] sends tensors: [`Tcp`] those on the CPU, and
//! `Nccl` (feature `cuda`) those on NVIDIA GPUs.
//!
//! All ranks call the same functions in the same order. A call returns when all ranks made it, or with an error:
//!
//! - A bad argument is refused before any byte is sent. The group stays usable, but the other ranks wait: a rank that
//!   cannot go on must drop its group or, better, call [`Group::abort`].
//! - Any other error of a call ends the group on all ranks ([`Group::check`] says why), except
//!   [`CommError::Disagree`], which all ranks return together.
//!
//! Connections have no authentication and no encryption: use them in trusted networks only.

mod communicator;
mod element;
mod error;
mod frame;
mod group;
mod handshake;
mod life;
pub mod local;
mod mesh;
#[cfg(feature = "cuda")]
mod nccl;
mod refusal;
mod rendezvous;
mod tcp;

pub use communicator::Communicator;
pub use error::{CommError, Result};
pub use group::{Group, MAX_MESSAGE};
pub use life::LOST_AFTER;
#[cfg(feature = "cuda")]
pub use nccl::Nccl;
pub use rendezvous::{JOIN_TIMEOUT, MAX_WORLD_SIZE, Rendezvous};
pub use tcp::Tcp;
