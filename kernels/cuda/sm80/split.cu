// Dense attention of few rows, split over the keys.
#include "instantiate.cuh"

S2O_KERNELS(s2o_split, s2o::SplitSchedule)
