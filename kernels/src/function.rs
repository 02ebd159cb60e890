//! [`Function`]: the kernels by what they do, and their names in the compiled code.

use std::fmt;

use crate::arch::Arch;

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Dense attention.
    Dense,
    /// S2O in a single pass (Algorithm 4): all rows below the threshold stop, the triggering tile is kept.
    Sparse,
    /// S2O in a single pass that never stops (tau 0).
    SparseFull,
    /// S2O in a single pass, every stop rule.
    SparseExact,
    /// The local windows alone, row states kept (Algorithm 2).
    Window,
    /// The prefix for query tiles in `q_perm` order (Algorithm 3), every stop rule.
    Prefix,
    /// All keys in a given order, not causal, with the stop of [`Self::Sparse`].
    Gather,
    /// The same without a stop.
    GatherFull,
    /// Dense attention of few rows, split over the keys.
    Split,
    /// Joins the parts of a split.
    Merge,
    /// Attention on lists of blocks.
    Block,
    /// Attention on lists of blocks, and single keys behind them.
    BlockColumns,
    /// Those lists from a mask.
    BlockLists,
    /// The chosen keys of each head, as a list.
    HeadColumns,
    /// Of these the keys of each query block, beside its key blocks.
    ColumnLists,
    /// Mean and variance of each segment's queries: the coefficients of the key scores.
    Moments,
    /// Scores of the keys before each segment.
    Scores,
    /// `kv_perm` from the scores.
    Sort,
    /// Mean of the first segment's keys.
    KeyGuide,
    /// `q_perm` from products with that mean.
    QueryOrder,
    /// A residual sum and its RMS norm.
    RmsNorm,
    /// `silu(gate) * up`.
    SiluMul,
    /// Queries and keys normalised and rotated, keys and values put into the cache.
    Rotate,
    /// cos and sin for the rotation.
    RotationTable,
    /// Softmax states of the last queries, chunk by chunk of the keys.
    QueryStates,
    /// Their attention by key and by distance.
    QueryShares,
    /// Keys and values in another order.
    Reorder,
    /// Tokens of strides behind each other.
    Strides,
    /// Softmaxes over strides, summed up by blocks.
    StrideShares,
    /// Means of blocks of tokens, and how alike their tokens are.
    BlockPool,
    /// What is chosen of rows of scores.
    RowChoice,
    /// The same of long rows.
    RowChoiceLong,
    /// The softmax of rows of scores.
    RowSoftmax,
}

impl Kernel {
    /// All of them.
    pub const ALL: [Self; 33] = [
        Self::Dense,
        Self::Sparse,
        Self::SparseFull,
        Self::SparseExact,
        Self::Window,
        Self::Prefix,
        Self::Gather,
        Self::GatherFull,
        Self::Split,
        Self::Merge,
        Self::Block,
        Self::BlockColumns,
        Self::BlockLists,
        Self::HeadColumns,
        Self::ColumnLists,
        Self::Moments,
        Self::Scores,
        Self::Sort,
        Self::KeyGuide,
        Self::QueryOrder,
        Self::RmsNorm,
        Self::SiluMul,
        Self::Rotate,
        Self::RotationTable,
        Self::QueryStates,
        Self::QueryShares,
        Self::Reorder,
        Self::Strides,
        Self::StrideShares,
        Self::BlockPool,
        Self::RowChoice,
        Self::RowChoiceLong,
        Self::RowSoftmax,
    ];

    /// Whether a launch says how much dynamic shared memory it needs.
    pub fn sizes_its_shared_memory(self) -> bool {
        matches!(self, Self::Sort | Self::QueryOrder)
    }

    /// Its part of the names in the compiled code.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Sparse => "sparse",
            Self::SparseFull => "sparse_full",
            Self::SparseExact => "sparse_exact",
            Self::Window => "window",
            Self::Prefix => "prefix",
            Self::Gather => "gather",
            Self::GatherFull => "gather_full",
            Self::Split => "split",
            Self::Merge => "merge",
            Self::Block => "block",
            Self::BlockColumns => "block_columns",
            Self::BlockLists => "block_lists",
            Self::HeadColumns => "head_columns",
            Self::ColumnLists => "column_lists",
            Self::Moments => "moments",
            Self::Scores => "scores",
            Self::Sort => "sort",
            Self::KeyGuide => "key_guide",
            Self::QueryOrder => "query_order",
            Self::RmsNorm => "rms_norm",
            Self::SiluMul => "silu_mul",
            Self::Rotate => "rotate",
            Self::RotationTable => "rotation_table",
            Self::QueryStates => "query_states",
            Self::QueryShares => "query_shares",
            Self::Reorder => "reorder",
            Self::Strides => "strides",
            Self::StrideShares => "stride_shares",
            Self::BlockPool => "block_pool",
            Self::RowChoice => "row_choice",
            Self::RowChoiceLong => "row_choice_long",
            Self::RowSoftmax => "row_softmax",
        }
    }
}

/// Element types that the kernels know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16
    Bf16,
    /// IEEE half precision
    F16,
}

/// Head sizes that the kernels know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadDim {
    /// 64
    D64,
    /// 128
    D128,
}

impl HeadDim {
    /// The size as a kernel's, if there is one.
    pub fn new(head_dim: usize) -> Option<Self> {
        match head_dim {
            64 => Some(Self::D64),
            128 => Some(Self::D128),
            _ => None,
        }
    }

    /// As a number.
    pub fn get(self) -> usize {
        match self {
            Self::D64 => 64,
            Self::D128 => 128,
        }
    }
}

/// A kernel for one element type and head size. Displays as its name in the compiled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Function {
    /// What it does.
    pub kernel: Kernel,
    /// On which elements.
    pub dtype: Dtype,
    /// On which head size.
    pub head_dim: HeadDim,
}

impl Function {
    /// Names a function.
    pub fn new(kernel: Kernel, dtype: Dtype, head_dim: HeadDim) -> Self {
        Self { kernel, dtype, head_dim }
    }

    /// The symbol that holds the [`LaunchInfo`](crate::LaunchInfo).
    pub fn launch_symbol(self) -> String {
        format!("{self}_launch")
    }

    /// The function that does its work in a build: on sm_80 one kernel knows every rule, and none.
    pub fn or_fallback(self, arch: Arch) -> Self {
        match (arch, self.kernel) {
            (Arch::Sm80, Kernel::SparseFull | Kernel::SparseExact) => Self { kernel: Kernel::Sparse, ..self },
            (Arch::Sm80, Kernel::GatherFull) => Self { kernel: Kernel::Gather, ..self },
            _ => self,
        }
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = match self.dtype {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        };
        let name = self.kernel.name();
        match self.kernel {
            // They see no elements.
            Kernel::BlockLists
            | Kernel::HeadColumns
            | Kernel::ColumnLists
            | Kernel::Sort
            | Kernel::RotationTable
            | Kernel::RowChoice
            | Kernel::RowChoiceLong
            | Kernel::RowSoftmax
            | Kernel::Reorder
            | Kernel::Strides => write!(f, "s2o_{name}"),
            // One serves every head size.
            Kernel::Merge | Kernel::RmsNorm | Kernel::SiluMul | Kernel::StrideShares => write!(f, "s2o_{name}_{dtype}"),
            _ => write!(f, "s2o_{name}_{dtype}_{}", self.head_dim.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_sources() {
        let function = Function::new(Kernel::SparseExact, Dtype::Bf16, HeadDim::D128);
        assert_eq!(function.to_string(), "s2o_sparse_exact_bf16_128");
        assert_eq!(function.launch_symbol(), "s2o_sparse_exact_bf16_128_launch");
        assert_eq!(function.or_fallback(Arch::Sm80).to_string(), "s2o_sparse_bf16_128");
        assert_eq!(Function { kernel: Kernel::Merge, ..function }.to_string(), "s2o_merge_bf16");
        assert_eq!(Function { kernel: Kernel::Sort, ..function }.to_string(), "s2o_sort");
    }
}
