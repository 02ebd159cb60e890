// S2O attention on sm_90a, single pass: causal window by TMA, prefix gathered by kv_perm; `full` never stops early
// (the ladder's variants B and C), `stop` asks the vote (D with tau 0, and S2O itself).
#include "engine_sm90.cuh"
#include "instantiate.cuh"

S2O_KERNEL(s2o_sparse_full_bf16_128, __nv_bfloat16, 128, s2o::SparseSchedule, true, false, S2O_GATHER_STAGES)
S2O_KERNEL(s2o_sparse_stop_bf16_128, __nv_bfloat16, 128, s2o::SparseSchedule, true, true, S2O_GATHER_STAGES)
S2O_KERNEL(s2o_sparse_stop_bf16_64, __nv_bfloat16, 64, s2o::SparseSchedule, true, true, S2O_GATHER_STAGES)
S2O_KERNEL(s2o_sparse_stop_f16_128, __half, 128, s2o::SparseSchedule, true, true, S2O_GATHER_STAGES)
