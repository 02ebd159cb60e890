// Dense attention with softcap or ALiBi, causal or not, for head_dim 64 and 128 and sequences of the same length. Other calls
// use `flash`.
#include "../modified_schedule.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_dense_modified, s2o::ModifiedSchedule)
