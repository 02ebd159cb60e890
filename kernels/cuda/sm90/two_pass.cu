// S2O attention on sm_90a with permuted queries: the causal window of every segment (Algorithm 2), then the prefix for
// query tiles in q_perm order (Algorithm 3).
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_pass1, s2o::Pass1Schedule)
S2O_KERNELS(s2o_pass2, s2o::Pass2Schedule, s2o::Stop::EXACT)
