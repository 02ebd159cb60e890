// Attention to all keys in a given order, not causal: the paper's ladder without causality. `gather_full` never stops.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_gather_full, s2o::GatherSchedule, true, s2o::Stop::NEVER)
S2O_KERNELS(s2o_gather, s2o::GatherSchedule, true, s2o::Stop::LAGGED)
