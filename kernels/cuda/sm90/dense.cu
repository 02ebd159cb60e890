// Dense attention on sm_90a, causal or not: every tile by TMA.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_dense, s2o::DenseSchedule)
S2O_WIDE_KERNELS(s2o_dense, 256, s2o::DenseSchedule)
