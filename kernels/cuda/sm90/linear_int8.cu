// Products in 8-bit integers, with a scale for each row and each output. The sums are exact.
#include "linear.cuh"

S2O_LINEAR_KERNEL(s2o_linear_int8_bf16, Int8Numbers, __nv_bfloat16, false)
S2O_LINEAR_KERNEL(s2o_linear_int8_f16, Int8Numbers, __half, false)
S2O_LINEAR_KERNEL(s2o_gated_linear_int8_bf16, Int8Numbers, __nv_bfloat16, true)
S2O_LINEAR_KERNEL(s2o_gated_linear_int8_f16, Int8Numbers, __half, true)
