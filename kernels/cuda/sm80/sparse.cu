// S2O: window and prefix in a single pass, or pass 1 and pass 2 on their own.
#include "instantiate.cuh"

S2O_KERNELS(s2o_sparse, s2o::SegmentSchedule<true>, NORMALISED)
S2O_KERNELS(s2o_window, s2o::SegmentSchedule<false>, STATEFUL)
S2O_KERNELS(s2o_prefix, s2o::PermutedSchedule, RESUMED)
