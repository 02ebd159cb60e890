//! [`Tcp`]: tensors on the CPU over the connections of a group.

use std::sync::Arc;

use candle_core::Tensor;

use crate::communicator::check_sends;
use crate::element;
use crate::frame::{Frame, Frames, Kind, Space};
use crate::{CommError, Communicator, Group, Result};

/// Sends tensors on the CPU over the connections of a group: F32, BF16, F16, U32 and U8.
#[derive(Debug, Clone)]
pub struct Tcp {
    group: Arc<Group>,
}

impl Tcp {
    /// A communicator of the group.
    pub fn new(group: Arc<Group>) -> Self {
        Self { group }
    }
}

impl Communicator for Tcp {
    fn group(&self) -> &Group {
        &self.group
    }

    fn all_to_all(&self, sends: &[Tensor], rows: &[usize]) -> Result<Tensor> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let (dtype, width) = check_sends(sends, rows, rank, world_size)?;
        for x in sends {
            element::check("sends", x)?;
        }
        let row_bytes = width.checked_mul(dtype.size_in_bytes());
        let total = rows.iter().try_fold(0_usize, |sum, &n| sum.checked_add(n));
        let bytes = total.zip(row_bytes).and_then(|(rows, bytes)| rows.checked_mul(bytes));
        let (Some(total), Some(row_bytes), Some(bytes)) = (total, row_bytes, bytes) else {
            return Err(CommError::size("rows", "rows that fit in memory", format!("{rows:?} of width {width}")));
        };
        let mut received = zeros(bytes)?;

        let mut frames = Vec::with_capacity(world_size);
        for (peer, x) in sends.iter().enumerate() {
            let mut frame = Frame::new([x.dim(0)?, width]);
            if peer != rank {
                element::append("sends", x, frame.content())?;
            }
            frames.push(frame);
        }
        let mut own = Vec::new();
        element::append("sends", &sends[rank], &mut own)?;
        let own_start = rows[..rank].iter().sum::<usize>() * row_bytes;
        received[own_start..own_start + own.len()].copy_from_slice(&own);

        let parts = split(&mut received, rows.iter().map(|&n| n * row_bytes));
        let spaces = parts.into_iter().zip(rows).map(|(part, &n)| Space::Rows([n, width], part)).collect();
        self.group.swap(Kind::AllToAll, dtype, Frames::Each(frames), spaces)?;
        element::tensor(&received, dtype, &[total, width])
    }

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let (dtype, count) = (x.dtype(), x.elem_count());
        element::check("x", x)?;
        // Refuses dtypes without a sum before anything is sent.
        element::sum(&[], dtype)?;
        let mut elements = Vec::new();
        element::append("x", x, &mut elements)?;
        let size = dtype.size_in_bytes();
        // Rank i adds the elements from bound(i) to bound(i + 1) and sends the sums to all: each is computed once.
        let bound = |rank: usize| count / world_size * rank + rank.min(count % world_size);
        let width = |rank: usize| bound(rank + 1) - bound(rank);
        let chunk = |rank: usize| bound(rank) * size..bound(rank + 1) * size;

        let frame = |j: usize| match j == rank {
            true => Frame::new([count, 0]),
            false => Frame::with([count, width(j)], &elements[chunk(j)]),
        };
        let frames = Frames::Each((0..world_size).map(frame).collect());
        let mut parts = vec![vec![0; width(rank) * size]; world_size];
        parts[rank].copy_from_slice(&elements[chunk(rank)]);
        let spaces = parts.iter_mut().map(|part| Space::Rows([count, width(rank)], part)).collect();
        self.group.swap(Kind::Parts, dtype, frames, spaces)?;
        let sum = element::sum(&parts, dtype)?;

        elements[chunk(rank)].copy_from_slice(&sum);
        let frames = Frames::Same(Frame::with([count, width(rank)], &sum));
        let chunks = split(&mut elements, (0..world_size).map(|i| width(i) * size));
        let spaces = chunks.into_iter().enumerate().map(|(i, chunk)| Space::Rows([count, width(i)], chunk)).collect();
        self.group.swap(Kind::Sums, dtype, frames, spaces)?;
        element::tensor(&elements, dtype, x.dims())
    }
}

/// Zero bytes, or an error where an allocation would end the process.
fn zeros(bytes: usize) -> Result<Vec<u8>> {
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(bytes).map_err(|_| CommError::Memory { bytes })?;
    zeros.resize(bytes, 0);
    Ok(zeros)
}

/// Cuts the bytes into parts of these lengths, which add up to all.
fn split(mut bytes: &mut [u8], lengths: impl Iterator<Item = usize>) -> Vec<&mut [u8]> {
    let mut parts = Vec::new();
    for length in lengths {
        let (part, rest) = bytes.split_at_mut(length);
        parts.push(part);
        bytes = rest;
    }
    parts
}
