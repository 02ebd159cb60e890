// Dense attention on sm_90a, causal or not: every tile by TMA.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_dense, s2o::DenseSchedule)
