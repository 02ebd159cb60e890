// Exact attention of the probes, split over the keys.
#include "instantiate.cuh"

S2O_KERNELS(s2o_probes, s2o::ProbeSchedule)
