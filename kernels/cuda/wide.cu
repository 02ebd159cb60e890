// Sparse attention with head_dim 256 in every build, by the portable engine: tiles of wgmma would hold 64 keys, and S2O's
// steps have 128.
#include "sm80/instantiate.cuh"

S2O_WIDE_KERNELS(s2o_split, s2o::SplitSchedule)
S2O_WIDE_KERNELS(s2o_single_pass, s2o::SinglePassSchedule)
S2O_WIDE_KERNELS(s2o_pass1, s2o::Pass1Schedule)
S2O_WIDE_KERNELS(s2o_pass2, s2o::Pass2Schedule)
S2O_WIDE_KERNELS(s2o_probes, s2o::ProbeSchedule)
S2O_WIDE_KERNELS(s2o_block, s2o::BlockSchedule)
S2O_WIDE_KERNELS(s2o_block_columns, s2o::ColumnSchedule)
