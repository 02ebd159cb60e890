//! [`Communicator`]: what a parallel decoder needs from its ranks.

use std::fmt::Debug;

use candle_core::{DType, Tensor};

use crate::{CommError, Group, Result};

/// Communication among the ranks of a group. All ranks call the same functions in the same order.
///
/// Results carry no gradients.
pub trait Communicator: Debug + Send + Sync {
    /// The group of ranks: its size, messages of the host and liveness.
    fn group(&self) -> &Group;

    /// Sends `sends[j]`, shape (rows, width), to rank j. Returns the received rows, shape (sum of `rows`, width): first
    /// those from rank 0, then those from rank 1, and so on. `rows[i]` is the number of rows that rank i sends here.
    ///
    /// Zero rows are allowed. All tensors on all ranks have one width and one dtype, contiguous or not.
    ///
    /// # Errors
    ///
    /// [`CommError::Size`], [`CommError::DType`] and [`CommError::NotOnCpu`] for arguments that do not fit,
    /// [`CommError::OutOfStep`] if another rank sends something else, and the errors of [`Group::check`].
    fn all_to_all(&self, sends: &[Tensor], rows: &[usize]) -> Result<Tensor>;

    /// The sum over all ranks, element by element, of any shape: the same bits on every rank.
    ///
    /// Elements are F32, BF16 or F16. [`Tcp`](crate::Tcp) adds in f32 in the order of the ranks and rounds once.
    ///
    /// # Errors
    ///
    /// As [`all_to_all`](Self::all_to_all).
    fn all_reduce(&self, x: &Tensor) -> Result<Tensor>;

    /// The rows of all ranks, in the order of the ranks, on all ranks: shape (sum of `rows`, width). `x` has shape (rows
    /// of this rank, width); `rows[i]` is the number of rows of rank i, the same list on all ranks.
    ///
    /// # Errors
    ///
    /// As [`all_to_all`](Self::all_to_all).
    fn all_gather(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        if let Some(&expected) = rows.get(self.rank())
            && x.dims().first() != Some(&expected)
        {
            let got = format!("shape {:?}", x.dims());
            return Err(CommError::size("x", format!("{expected} rows, as rows says"), got));
        }
        self.all_to_all(&vec![x.clone(); self.world_size()], rows)
    }

    /// [`Self::all_to_all`] of sends that are computed one by one, of F32, BF16 or F16: `send(j)` returns what goes to rank
    /// j. It is called once for each rank, in any order, and a communicator may send one while the next is computed.
    ///
    /// # Errors
    ///
    /// As [`all_to_all`](Self::all_to_all), and those of `send`. After one of them the other ranks wait.
    fn all_to_all_computed(
        &self,
        send: &mut dyn FnMut(usize) -> candle_core::Result<Tensor>,
        rows: &[usize],
    ) -> Result<Tensor> {
        let sends = (0..self.world_size()).map(send).collect::<candle_core::Result<Vec<_>>>()?;
        self.all_to_all(&sends, rows)
    }

    /// [`Self::all_reduce`] of a tensor (rows, width) that is computed in slices of its rows, from the first to the last. A
    /// communicator may add one while the next is computed.
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce), those of the slices, and [`CommError::Size`] if they do not have `rows` rows
    /// together. After one of them the other ranks wait.
    fn all_reduce_computed(
        &self,
        slices: &mut dyn Iterator<Item = candle_core::Result<Tensor>>,
        rows: usize,
    ) -> Result<Tensor> {
        let slices = slices.collect::<candle_core::Result<Vec<_>>>()?;
        let got = slices.iter().map(|slice| slice.dims().first().copied().unwrap_or_default()).sum::<usize>();
        if slices.is_empty() || got != rows {
            return Err(CommError::size("slices", format!("{rows} rows together"), got));
        }
        self.all_reduce(&Tensor::cat(&slices, 0)?)
    }

    /// This rank, from 0.
    fn rank(&self) -> usize {
        self.group().rank()
    }

    /// The number of ranks.
    fn world_size(&self) -> usize {
        self.group().world_size()
    }
}

pub(crate) fn check_one_per_rank(name: &'static str, got: usize, world_size: usize) -> Result<()> {
    if got == world_size {
        return Ok(());
    }
    Err(CommError::size(name, format!("one per rank, {world_size}"), got))
}

/// Refuses sends that do not fit. Returns their dtype and width.
pub(crate) fn check_sends(sends: &[Tensor], rows: &[usize], rank: usize, world_size: usize) -> Result<(DType, usize)> {
    check_one_per_rank("sends", sends.len(), world_size)?;
    check_one_per_rank("rows", rows.len(), world_size)?;
    let dtype = sends[0].dtype();
    let mut width = None;
    for x in sends {
        let &[_, this] = x.dims() else {
            return Err(CommError::size("sends", "shape (rows, width)", format!("{:?}", x.dims())));
        };
        let width = *width.get_or_insert(this);
        if this != width || x.dtype() != dtype {
            let got = format!("{this} of {:?}", x.dtype());
            return Err(CommError::size("sends", format!("one width and dtype, {width} of {dtype:?}"), got));
        }
    }
    let own = sends[rank].dims()[0];
    if own != rows[rank] {
        return Err(CommError::size("rows", format!("{own} from this rank, as in sends"), rows[rank]));
    }
    Ok((dtype, width.unwrap_or(0)))
}
