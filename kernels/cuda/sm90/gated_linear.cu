// Gated products in 16 bits, with sums in f32. cuBLAS computes the products without a gate.
#include "linear.cuh"

S2O_LINEAR_KERNEL(s2o_gated_linear_bf16, PlainNumbers<__nv_bfloat16>, __nv_bfloat16, true)
S2O_LINEAR_KERNEL(s2o_gated_linear_f16, PlainNumbers<__half>, __half, true)
