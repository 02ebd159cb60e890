//! The ops and their public functions. The backends implement the computation.

mod block;
mod dense;
mod s2o;

pub use block::{KeyColumns, block_mask_attn, block_sparse_attn};
pub use dense::dense_attn;
pub use s2o::{S2oOp, s2o_attn, s2o_attn_with_stats};

pub(crate) use block::{BlockOp, MaskOp};
pub(crate) use dense::DenseOp;
pub(crate) use s2o::RankOp;
