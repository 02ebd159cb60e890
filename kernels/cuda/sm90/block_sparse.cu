// Attention on lists of blocks on sm_90a.
#include "engine.cuh"
#include "instantiate.cuh"

S2O_KERNELS(s2o_block, s2o::BlockSchedule)
S2O_KERNELS(s2o_block_columns, s2o::ColumnSchedule)
