// Attention to all keys in a given order, not causal: the paper's ladder without causality.
#include "instantiate.cuh"

S2O_KERNELS(s2o_ladder, s2o::LadderSchedule)
