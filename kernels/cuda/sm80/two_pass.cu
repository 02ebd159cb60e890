// S2O in two passes: the window of every query, then the prefix for queries in q_perm order.
#include "instantiate.cuh"

S2O_KERNELS(s2o_window, s2o::SegmentSchedule<false>, STATEFUL)
S2O_KERNELS(s2o_prefix, s2o::PermutedSchedule, RESUMED)
