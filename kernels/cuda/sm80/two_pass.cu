// S2O in two passes: the window of every query, then the prefix for queries in q_perm order.
#include "instantiate.cuh"

S2O_KERNELS(s2o_pass1, s2o::Pass1Schedule)
S2O_KERNELS(s2o_pass2, s2o::Pass2Schedule)
