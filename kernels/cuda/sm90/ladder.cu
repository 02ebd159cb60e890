// Attention to all keys in a given order, not causal: the paper's ladder without causality. `ladder_full` never stops.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_ladder_full, s2o::LadderSchedule)
S2O_KERNELS(s2o_ladder, s2o::LadderSchedule, s2o::Stop::LAGGED_GAINS)
