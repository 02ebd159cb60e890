// Dense attention with softcap or ALiBi, causal or not, for head_dim 64 and sequences of the same length. Other calls use
// `flash`: with 128 columns this engine has too few registers.
#include "../modified_schedule.cuh"
#include "instantiate.cuh"

S2O_KERNEL(s2o_dense_modified_bf16_64, __nv_bfloat16, 64, s2o::ModifiedSchedule)
S2O_KERNEL(s2o_dense_modified_f16_64, __half, 64, s2o::ModifiedSchedule)
