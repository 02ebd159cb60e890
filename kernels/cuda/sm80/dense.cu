// Dense attention, causal or not.
#include "instantiate.cuh"

S2O_KERNELS(s2o_dense, s2o::DenseSchedule)
S2O_WIDE_KERNELS(s2o_dense, s2o::DenseSchedule)
