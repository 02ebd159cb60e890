// Single-pass S2O: causal window, then the prefix gathered by kv_perm; every stop rule, decided before the next tile.
#include "instantiate.cuh"

S2O_KERNELS(s2o_single_pass, s2o::SinglePassSchedule)
