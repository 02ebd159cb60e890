// Dense attention, causal or not: whole rows, and split over the keys.
#include "instantiate.cuh"

S2O_KERNELS(s2o_dense, s2o::DenseSchedule, NORMALISED)
S2O_KERNELS(s2o_split, s2o::SplitSchedule, PARTIAL)
