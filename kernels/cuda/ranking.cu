// The ranking kernels, for every architecture from sm_80 on.
#include "launch.cuh"
#include "ranking_moments.cuh"
#include "ranking_queries.cuh"
#include "ranking_scores.cuh"
#include "ranking_sort.cuh"

// A LaunchInfo with 0 shared bytes leaves the size to the launch.
#define S2O_RANKING_KERNEL(name, threads, min_blocks, shared_bytes, ...)                                      \
    extern "C" {                                                                                              \
    __constant__ s2o::LaunchInfo name##_launch = {threads, shared_bytes, 0, 0, s2o::OVERLAPS};                \
    __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ s2o::RankingParams p) { \
        s2o::overlap();                                                                                       \
        __VA_ARGS__;                                                                                          \
    }                                                                                                         \
    }

// Three CTAs of `moments` where the registers of four would spill.
#define S2O_RANKING_KERNELS(suffix, T, D)                                                                     \
    S2O_RANKING_KERNEL(s2o_moments_##suffix, s2o::MOMENT_THREADS, \
                       D > 128 || (D == 128 && s2o::Packed<T>::NARROW_RANGE) ? 3 : 4, 0, \
                       p.prefix_score ? s2o::segment_moments<T, D, true>(p) : s2o::segment_moments<T, D, false>(p)) \
    S2O_RANKING_KERNEL(s2o_prefix_factors_##suffix, s2o::MOMENT_THREADS, 3, 0, s2o::prefix_factors<T, D>(p)) \
    S2O_RANKING_KERNEL(s2o_scores_##suffix, s2o::SCORE_THREADS, D > 128 ? 2 : 3, \
                       s2o::SCORE_STAGES * s2o::SCORE_TILE_BYTES<D>, \
                       p.second_cumulant != 0.f ? s2o::key_scores<T, D, true>(p) : s2o::key_scores<T, D, false>(p)) \
    S2O_RANKING_KERNEL(s2o_key_guide_##suffix, s2o::GUIDE_THREADS, 1, 0, s2o::key_guide<T, D>(p))             \
    S2O_RANKING_KERNEL(s2o_query_order_##suffix, s2o::QUERY_ORDER_THREADS, 1, 0, s2o::query_order<T, D>(p))

S2O_RANKING_KERNELS(bf16_256, __nv_bfloat16, 256)
S2O_RANKING_KERNELS(bf16_128, __nv_bfloat16, 128)
S2O_RANKING_KERNELS(bf16_64, __nv_bfloat16, 64)
S2O_RANKING_KERNELS(f16_256, __half, 256)
S2O_RANKING_KERNELS(f16_128, __half, 128)
S2O_RANKING_KERNELS(f16_64, __half, 64)

S2O_RANKING_KERNEL(s2o_sort, s2o::SORT_THREADS, 1, 0, s2o::sort_row(p))
