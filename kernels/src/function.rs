//! [`Kernel`] and [`Function`]: the kernels and their names in the compiled code.

use std::fmt;

use crate::arch::Arch;

/// Number of functions that a kernel is compiled to.
enum Instances {
    /// One, independent of element type and head size.
    Single,
    PerDtype,
    /// One per element type and head size.
    PerHeadDim,
}

macro_rules! kernels {
    ($($(#[doc = $doc:literal])* $kernel:ident = $name:literal, $instances:ident;)*) => {
        /// A kernel, named by what it computes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kernel {
            $($(#[doc = $doc])* $kernel,)*
        }

        impl Kernel {
            /// All kernels.
            pub const ALL: &[Self] = &[$(Self::$kernel),*];

            /// The kernel's part of its names in the compiled code.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kernel => $name,)*
                }
            }

            fn instances(self) -> Instances {
                match self {
                    $(Self::$kernel => Instances::$instances,)*
                }
            }
        }
    };
}

kernels! {
    /// Dense attention.
    Dense = "dense", PerHeadDim;
    /// Dense attention with windows, ALiBi, softcap, sequences and pages; for every [`HeadDim`].
    Flash = "flash", PerHeadDim;
    /// Dense attention with softcap, ALiBi or sequences. On sm_80 without sequences and for heads of 64 columns; otherwise it is
    /// [`Self::Flash`] there.
    DenseModified = "dense_modified", PerHeadDim;
    /// [`Self::DenseModified`] with keys and values in pages of a multiple of [`LEAST_BOX_ROWS`](crate::LEAST_BOX_ROWS) tokens.
    DensePaged = "dense_paged", PerHeadDim;
    /// S2O in a single pass (Algorithm 4): all rows below the threshold stop, the triggering tile is kept.
    SinglePass = "single_pass", PerHeadDim;
    /// [`Self::SinglePass`] with the stop rules that look at the largest weights.
    SinglePassWeights = "single_pass_weights", PerHeadDim;
    /// S2O in a single pass that never stops (tau 0).
    SinglePassFull = "single_pass_full", PerHeadDim;
    /// S2O in a single pass, every stop rule.
    SinglePassExact = "single_pass_exact", PerHeadDim;
    /// The local windows alone, row states kept (Algorithm 2).
    Pass1 = "pass1", PerHeadDim;
    /// The prefix for query tiles in `q_perm` order (Algorithm 3), every stop rule.
    Pass2 = "pass2", PerHeadDim;
    /// All keys in a given order, not causal, with the stop of [`Self::SinglePass`]. Needs the feature `ladder`.
    Ladder = "ladder", PerHeadDim;
    /// [`Self::Ladder`] without a stop.
    LadderFull = "ladder_full", PerHeadDim;
    /// Dense attention of few rows, split over the keys.
    Split = "split", PerHeadDim;
    /// Dense attention of one query per sequence, split over the keys.
    Decode = "decode", PerHeadDim;
    /// [`Self::Decode`] on keys and values in 8 bits.
    DecodeInt8 = "decode_int8", PerHeadDim;
    /// Joins the parts of a split.
    Merge = "merge", PerDtype;
    /// One probe for each run of positions, and their queries side by side.
    ProbeChoice = "probe_choice", PerHeadDim;
    /// The queries of a short dense tail side by side, for [`Self::Probes`].
    TailQueries = "tail_queries", PerHeadDim;
    /// Exact attention of the probes, split over the keys.
    Probes = "probes", PerHeadDim;
    /// The common tail of the keys that a segment's queries skipped, and the measured error.
    ProbeTails = "probe_tails", PerHeadDim;
    /// Lists the heads and segments whose measured error was too large.
    ProbeUnits = "probe_units", Single;
    /// Adds the tails to the rows that skipped keys, and gives the probes their exact output.
    ProbeCorrection = "probe_correction", PerHeadDim;
    /// Attention on lists of blocks.
    Block = "block", PerHeadDim;
    /// Attention on lists of blocks and on single keys after them.
    BlockColumns = "block_columns", PerHeadDim;
    /// Converts a mask to the lists of [`Self::Block`].
    BlockLists = "block_lists", Single;
    /// Lists the chosen keys of each head.
    HeadColumns = "head_columns", Single;
    /// Lists, for each query block, the keys of [`Self::HeadColumns`] that its key blocks do not cover.
    ColumnLists = "column_lists", Single;
    /// Mean and variance of the keys before each segment, as factors of its queries.
    PrefixFactors = "prefix_factors", PerHeadDim;
    /// Mean and variance of each segment's queries: the coefficients of the key scores. With [`Self::PrefixFactors`], an
    /// estimate of the mean weight of the keys before the segment for each query too.
    Moments = "moments", PerHeadDim;
    /// Scores of the keys before each segment.
    Scores = "scores", PerHeadDim;
    /// `kv_perm` from the scores.
    Sort = "sort", Single;
    /// Mean of the first segment's keys.
    KeyGuide = "key_guide", PerHeadDim;
    /// `q_perm` from products with that mean.
    QueryOrder = "query_order", PerHeadDim;
    /// A residual sum and its RMS norm.
    RmsNorm = "rms_norm", PerDtype;
    /// `silu(gate) * up`.
    SiluMul = "silu_mul", PerDtype;
    /// Rows, rotated, in 8 bits with a scale each. Only on sm_90a, as the next five.
    Quantise = "quantise", PerDtype;
    /// [`Self::RmsNorm`], quantised.
    RmsNormInt8 = "rms_norm_int8", PerDtype;
    /// The product of a few rows in 8 bits with a matrix in 8 bits, or the gated product with two.
    FewRowsInt8 = "few_rows_int8", PerDtype;
    /// The product of many rows in 8 bits with a matrix in 8 bits.
    LinearInt8 = "linear_int8", PerDtype;
    /// The gated product of many rows in 8 bits with two matrices in 8 bits.
    GatedLinearInt8 = "gated_linear_int8", PerDtype;
    /// The same in 16 bits.
    GatedLinear = "gated_linear", PerDtype;
    /// Queries and keys normalised and rotated, keys and values put into the cache.
    Rotate = "rotate", PerHeadDim;
    /// Rows of keys or values to 8 bits.
    StoreInt8 = "store_int8", PerHeadDim;
    /// Rows of keys or values from 8 bits.
    LoadInt8 = "load_int8", PerHeadDim;
    /// cos and sin for the rotation.
    RotationTable = "rotation_table", Single;
    /// Softmax states of the last queries for each chunk of keys.
    LastQueryStates = "last_query_states", PerHeadDim;
    /// Attention of the last queries, summed by key and by distance.
    LastQueryScores = "last_query_scores", PerHeadDim;
    /// Keys and values of one sequence out of pages.
    Pages = "pages", Single;
    /// Heads in another size.
    ResizeHeads = "resize_heads", Single;
    /// The heads of all ranks side by side.
    JoinHeads = "join_heads", Single;
    /// The likeliest token of a row of logits.
    Likeliest = "likeliest", Single;
    /// Keys and values in another order.
    Reorder = "reorder", Single;
    /// The tokens of each stride, contiguous.
    Strides = "strides", Single;
    /// Softmaxes over strides, summed by blocks.
    StrideShares = "stride_shares", PerDtype;
    /// Means of blocks of tokens, and the self-similarity of the blocks.
    BlockPool = "block_pool", PerHeadDim;
    /// Top-p or top-k of rows of scores.
    RowChoice = "row_choice", Single;
    /// [`Self::RowChoice`] for long rows.
    RowChoiceLong = "row_choice_long", Single;
    /// The softmax of rows of scores.
    RowSoftmax = "row_softmax", Single;
}

impl Kernel {
    /// Whether a build has the kernel, or another that replaces it ([`Function::or_fallback`]).
    pub fn is_in(self, arch: Arch) -> bool {
        let is_of_hopper = matches!(
            self,
            Self::Quantise
                | Self::RmsNormInt8
                | Self::FewRowsInt8
                | Self::LinearInt8
                | Self::GatedLinearInt8
                | Self::GatedLinear
        );
        arch == Arch::Sm90a || !is_of_hopper
    }

    /// The head sizes that the kernel is compiled for.
    pub fn head_dims(self) -> &'static [HeadDim] {
        match self {
            Self::Flash => &HeadDim::FLASH,
            Self::DenseModified | Self::DensePaged => &HeadDim::MODIFIED,
            Self::Dense | Self::Split | Self::Block | Self::BlockColumns => &HeadDim::ATTENTION,
            kernel if kernel.is_single_pass() => &HeadDim::ATTENTION,
            Self::Pass1 | Self::Pass2 | Self::Moments | Self::Scores | Self::KeyGuide | Self::QueryOrder => {
                &HeadDim::ATTENTION
            }
            Self::PrefixFactors
            | Self::ProbeChoice
            | Self::TailQueries
            | Self::Probes
            | Self::ProbeTails
            | Self::ProbeCorrection => &HeadDim::ATTENTION,
            _ => &HeadDim::NARROW,
        }
    }

    fn is_single_pass(self) -> bool {
        matches!(self, Self::SinglePass | Self::SinglePassWeights | Self::SinglePassFull | Self::SinglePassExact)
    }

    /// Whether the kernel has functions that cap the scores.
    pub fn has_capped(self) -> bool {
        self.is_single_pass() || matches!(self, Self::Dense | Self::Split | Self::Pass1 | Self::Pass2 | Self::Probes)
    }

    /// The head size of the kernel's functions for heads of this size, or `None` if it has no such functions.
    pub fn head_dim(self, size: usize) -> Option<HeadDim> {
        self.head_dims().iter().copied().find(|head_dim| head_dim.0 == size)
    }

    /// The smallest head size of the kernel's functions that holds heads of this size: [`Self::Flash`],
    /// [`Self::DenseModified`], [`Self::DensePaged`] and [`Self::Decode`] take narrower heads, in multiples of 8.
    pub fn holding(self, size: usize) -> Option<HeadDim> {
        self.head_dims().iter().copied().find(|head_dim| size <= head_dim.0)
    }

    /// Whether the amount of dynamic shared memory depends on the launch.
    pub fn sizes_its_shared_memory(self) -> bool {
        matches!(self, Self::Sort | Self::QueryOrder)
    }
}

/// Element types that the kernels support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16
    Bf16,
    /// IEEE half precision
    F16,
}

/// A head size of kernels ([`Kernel::head_dims`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeadDim(usize);

impl HeadDim {
    /// 64
    pub const D64: Self = Self(64);
    /// 128
    pub const D128: Self = Self(128);
    /// 256
    pub const D256: Self = Self(256);
    /// The sizes of most kernels.
    pub const NARROW: [Self; 2] = [Self::D64, Self::D128];
    /// The sizes of the kernels of S2O and of dense and block-sparse attention.
    pub const ATTENTION: [Self; 3] = [Self::D64, Self::D128, Self::D256];
    /// The sizes of [`Kernel::DenseModified`] and [`Kernel::DensePaged`].
    pub const MODIFIED: [Self; 4] = [Self::D64, Self::D128, Self(192), Self::D256];
    /// The sizes of [`Kernel::Flash`].
    pub const FLASH: [Self; 8] =
        [Self::D64, Self(96), Self::D128, Self(160), Self(192), Self(224), Self::D256, Self(512)];

    /// The size as a number.
    pub fn get(self) -> usize {
        self.0
    }
}

/// A kernel for one element type and head size, with or without softcap. Displays as its name in the compiled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Function {
    /// The kernel.
    pub kernel: Kernel,
    /// The element type.
    pub dtype: Dtype,
    /// The head size.
    pub head_dim: HeadDim,
    /// Whether it caps the scores.
    pub capped: bool,
}

impl Function {
    /// Creates the name of a function without softcap.
    pub fn new(kernel: Kernel, dtype: Dtype, head_dim: HeadDim) -> Self {
        Self { kernel, dtype, head_dim, capped: false }
    }

    /// The symbol that holds the [`LaunchInfo`](crate::LaunchInfo).
    pub fn launch_symbol(self) -> String {
        format!("{self}_launch")
    }

    /// Whether the portable engine of sm_80 computes sparse attention, as in every build with head_dim 256 or softcap.
    fn is_portable(self, arch: Arch) -> bool {
        arch == Arch::Sm80 || self.head_dim > HeadDim::D128 || self.capped
    }

    /// The function to launch instead in a build: one kernel of the portable engine implements every stop rule, including
    /// none, and on sm_80 one kernel all options of FlashAttention.
    pub fn or_fallback(self, arch: Arch) -> Self {
        match (arch, self.kernel) {
            (_, kernel) if kernel.is_single_pass() && self.is_portable(arch) => {
                Self { kernel: Kernel::SinglePass, ..self }
            }
            (Arch::Sm80, Kernel::DensePaged) => Self { kernel: Kernel::Flash, ..self },
            (Arch::Sm80, Kernel::DenseModified) if self.head_dim > HeadDim::D128 => {
                Self { kernel: Kernel::Flash, ..self }
            }
            (Arch::Sm80, Kernel::LadderFull) => Self { kernel: Kernel::Ladder, ..self },
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
        let name = format!("{}{}", self.kernel.name(), if self.capped { "_capped" } else { "" });
        match self.kernel.instances() {
            Instances::Single => write!(f, "s2o_{name}"),
            Instances::PerDtype => write!(f, "s2o_{name}_{dtype}"),
            Instances::PerHeadDim => write!(f, "s2o_{name}_{dtype}_{}", self.head_dim.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_sources() {
        let function = Function::new(Kernel::SinglePassExact, Dtype::Bf16, HeadDim::D128);
        assert_eq!(function.to_string(), "s2o_single_pass_exact_bf16_128");
        assert_eq!(function.launch_symbol(), "s2o_single_pass_exact_bf16_128_launch");
        assert_eq!(function.or_fallback(Arch::Sm80).to_string(), "s2o_single_pass_bf16_128");
        let wide = Function { head_dim: HeadDim::D256, ..function };
        assert_eq!(wide.or_fallback(Arch::Sm90a).to_string(), "s2o_single_pass_bf16_256");
        let capped = Function { capped: true, ..function };
        assert_eq!(capped.or_fallback(Arch::Sm90a).to_string(), "s2o_single_pass_capped_bf16_128");
        let modified = Function { kernel: Kernel::DenseModified, ..function };
        assert_eq!(modified.or_fallback(Arch::Sm80).to_string(), "s2o_dense_modified_bf16_128");
        let wide = Function { head_dim: HeadDim::D256, ..modified };
        assert_eq!(wide.or_fallback(Arch::Sm80).to_string(), "s2o_flash_bf16_256");
        assert_eq!(modified.or_fallback(Arch::Sm90a).to_string(), "s2o_dense_modified_bf16_128");
        assert_eq!(Function { kernel: Kernel::Merge, ..function }.to_string(), "s2o_merge_bf16");
        assert_eq!(Function { kernel: Kernel::Sort, ..function }.to_string(), "s2o_sort");
        assert_eq!(Kernel::SinglePass.head_dim(256), Some(HeadDim::D256));
        assert_eq!([Kernel::Decode.head_dim(256), Kernel::SinglePass.head_dim(96)], [None, None]);
        let holding = |kernel: Kernel, size| kernel.holding(size).map(HeadDim::get);
        assert_eq!([8, 64, 72, 128].map(|size| holding(Kernel::Decode, size)), [64, 64, 128, 128].map(Some));
        assert_eq!([72, 104, 264].map(|size| holding(Kernel::Flash, size)), [96, 128, 512].map(Some));
        assert_eq!([136, 200].map(|size| holding(Kernel::DensePaged, size)), [192, 256].map(Some));
        assert_eq!([holding(Kernel::Decode, 136), holding(Kernel::Flash, 520)], [None, None]);
    }
}
