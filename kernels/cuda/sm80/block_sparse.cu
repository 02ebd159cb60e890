// Attention on the lists of blocks that block-sparse methods select.
#include "instantiate.cuh"

S2O_KERNELS(s2o_block, s2o::BlockSchedule)
S2O_KERNELS(s2o_block_columns, s2o::ColumnSchedule)
