// Attention with softcap in every build, by the portable engine.
#include "sm80/instantiate.cuh"

S2O_CAPPED_KERNELS(s2o_dense, s2o::DenseSchedule)
S2O_CAPPED_KERNELS(s2o_split, s2o::SplitSchedule)
S2O_CAPPED_KERNELS(s2o_single_pass, s2o::SinglePassSchedule)
S2O_CAPPED_KERNELS(s2o_pass1, s2o::Pass1Schedule)
S2O_CAPPED_KERNELS(s2o_pass2, s2o::Pass2Schedule)
S2O_CAPPED_KERNELS(s2o_probes, s2o::ProbeSchedule)
