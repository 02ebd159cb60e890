// Dense attention on sm_90a, causal or not: the engine with every tile by TMA.
#include "engine_sm90.cuh"
#include "instantiate.cuh"

S2O_KERNEL(s2o_dense_bf16_128, __nv_bfloat16, 128, s2o::DenseSchedule, false, false, S2O_STAGES)
S2O_KERNEL(s2o_dense_bf16_64, __nv_bfloat16, 64, s2o::DenseSchedule, false, false, S2O_STAGES)
S2O_KERNEL(s2o_dense_f16_128, __half, 128, s2o::DenseSchedule, false, false, S2O_STAGES)
S2O_KERNEL(s2o_dense_f16_64, __half, 64, s2o::DenseSchedule, false, false, S2O_STAGES)
