// Exact attention of the probes on sm_90a, split over the keys; merge.cu joins the parts.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_probes, s2o::ProbeSchedule)
