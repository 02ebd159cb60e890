// The ranking kernels, for every architecture from sm_80 on.
#include "ranking_moments.cuh"
#include "ranking_queries.cuh"
#include "ranking_scores.cuh"
#include "ranking_sort.cuh"

#define S2O_RANKING_KERNELS(suffix, T, D)                                                                   \
    extern "C" __global__ void __launch_bounds__(s2o::MOMENT_THREADS, 4)                                    \
        s2o_moments_##suffix(const __grid_constant__ s2o::RankingParams p) {                                \
        s2o::segment_moments<T, D>(p);                                                                      \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(s2o::SCORE_THREADS, 2)                                     \
        s2o_scores_##suffix(const __grid_constant__ s2o::RankingParams p) {                                 \
        if (p.second_cumulant != 0.f) s2o::key_scores<T, D, true>(p);                                       \
        else s2o::key_scores<T, D, false>(p);                                                               \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(s2o::GUIDE_THREADS)                                        \
        s2o_key_guide_##suffix(const __grid_constant__ s2o::RankingParams p) {                              \
        s2o::key_guide<T, D>(p);                                                                            \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(s2o::QUERY_ORDER_THREADS)                                  \
        s2o_query_order_##suffix(const __grid_constant__ s2o::RankingParams p) {                            \
        s2o::query_order<T, D>(p);                                                                          \
    }

S2O_RANKING_KERNELS(bf16_128, __nv_bfloat16, 128)
S2O_RANKING_KERNELS(bf16_64, __nv_bfloat16, 64)
S2O_RANKING_KERNELS(f16_128, __half, 128)
S2O_RANKING_KERNELS(f16_64, __half, 64)

extern "C" __global__ void __launch_bounds__(s2o::SORT_THREADS, 1) s2o_sort(const __grid_constant__ s2o::RankingParams p) {
    s2o::sort_row(p);
}
