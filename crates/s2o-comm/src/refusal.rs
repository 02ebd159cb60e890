//! [`Refusal`]: rank 0's answer to all ranks if they cannot form a group.

use std::time::Duration;

use crate::CommError;
use crate::handshake::{Fields, put_text};

/// Why rank 0 refuses all ranks. All return the same error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    Version { rank: usize, expected: String, got: String },
    WorldSize { rank: usize, expected: usize, got: usize },
    Twice { rank: usize },
    Missing(Vec<usize>),
    Busy,
}

impl Refusal {
    /// The answer that carries it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |tag: u8, numbers: &[usize]| {
            bytes.push(tag);
            bytes.extend(numbers.iter().flat_map(|&n| (n as u32).to_le_bytes()));
        };
        match self {
            Self::Version { rank, expected, got } => {
                put(1, &[*rank]);
                put_text(&mut bytes, expected);
                put_text(&mut bytes, got);
            }
            Self::WorldSize { rank, expected, got } => put(2, &[*rank, *expected, *got]),
            Self::Twice { rank } => put(3, &[*rank]),
            Self::Missing(ranks) => put(4, ranks),
            Self::Busy => put(5, &[]),
        }
        bytes
    }

    /// `None` if the answer carries none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let tag = fields.byte()?;
        let mut number = || fields.u32().map(|n| n as usize);
        Some(match tag {
            1 => Self::Version { rank: number()?, expected: fields.text()?, got: fields.text()? },
            2 => Self::WorldSize { rank: number()?, expected: number()?, got: number()? },
            3 => Self::Twice { rank: number()? },
            4 => Self::Missing(std::iter::from_fn(number).collect()),
            5 => Self::Busy,
            _ => return None,
        })
    }

    /// The error of a rank that waited at `address` for `timeout`.
    pub fn error(self, address: &str, timeout: Duration) -> CommError {
        match self {
            Self::Version { rank, expected, got } => CommError::Version { rank, expected, got },
            Self::WorldSize { rank, expected, got } => CommError::WorldSize { rank, expected, got },
            Self::Twice { rank } => CommError::RankTwice { rank },
            Self::Missing(missing) => CommError::MissingRanks { missing, timeout },
            Self::Busy => CommError::Busy { address: address.into() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_survive_the_way() {
        let text = || String::from("a");
        for refusal in [
            Refusal::Version { rank: 1, expected: text(), got: String::new() },
            Refusal::WorldSize { rank: 3, expected: 2, got: 4 },
            Refusal::Twice { rank: 2 },
            Refusal::Missing(vec![1, 255]),
            Refusal::Busy,
        ] {
            assert_eq!(Refusal::decode(&refusal.encode()), Some(refusal));
        }
    }
}
