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

    /// This rank, from 0.
    fn rank(&self) -> usize {
        self.group().rank()
    }

    /// The number of ranks.
    fn world_size(&self) -> usize {
        self.group().world_size()
    }
}

/// Refuses sends that do not fit. Returns their dtype and width.
pub(crate) fn check_sends(sends: &[Tensor], rows: &[usize], rank: usize, world_size: usize) -> Result<(DType, usize)> {
    let one_per_rank = format!("one per rank, {world_size}");
    if sends.len() != world_size {
        return Err(CommError::size("sends", one_per_rank, sends.len()));
    }
    if rows.len() != world_size {
        return Err(CommError::size("rows", one_per_rank, rows.len()));
    }
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
