// Single-pass S2O on sm_90a (Algorithm 4): causal window by TMA, prefix gathered by kv_perm. `single_pass_full` never
// stops early (tau 0, the ladder's B and C). `single_pass` stops by AllRows and `single_pass_weights` by MaxWeight or
// MeanWeight, one tile late, and they keep every tile. `single_pass_exact` implements every rule.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_single_pass_full, s2o::SinglePassSchedule)
S2O_KERNELS(s2o_single_pass, s2o::SinglePassSchedule, s2o::Stop::LAGGED_GAINS)
S2O_KERNELS(s2o_single_pass_weights, s2o::SinglePassSchedule, s2o::Stop::LAGGED_WEIGHTS)
S2O_KERNELS(s2o_single_pass_exact, s2o::SinglePassSchedule, s2o::Stop::EXACT)
