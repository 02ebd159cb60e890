// S2O attention on sm_90a with permuted queries: the causal window of every segment (Algorithm 2), then the prefix for
// query tiles in q_perm order (Algorithm 3).
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_window, s2o::SegmentSchedule<false>)
S2O_KERNELS(s2o_prefix, s2o::PermutedSchedule, true, s2o::Stop::EXACT)
