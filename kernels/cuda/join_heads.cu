// The heads of all ranks side by side, after each rank has sent the rows of its heads. Copies 16-byte pieces, for any
// 16-bit element type.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"

namespace s2o {

constexpr int JOIN_THREADS = 256;
constexpr int JOIN_ROWS = 4;  // per block

struct JoinHeadsParams {
    const void* x;          // (ranks, rows, groups / ranks, width)
    const uint32_t* slots;  // (groups): where x has each group of `out`, counted rank after rank
    void* out;              // (rows, groups, width)
    int64_t rows;
    int32_t groups;
    int32_t of_rank;        // groups / ranks
    int32_t pieces;         // width / 8
};
static_assert(sizeof(JoinHeadsParams) == 48 && offsetof(JoinHeadsParams, rows) == 24, "mirrored on the host");

// Grid ceil(rows / JOIN_ROWS).
__device__ __forceinline__ void join_heads(const JoinHeadsParams& p) {
    const int per_row = p.groups * p.pieces;
    const int64_t first = int64_t(blockIdx.x) * JOIN_ROWS;
    const int count = int(min(int64_t(JOIN_ROWS), p.rows - first)) * per_row;
    const uint4* x = static_cast<const uint4*>(p.x);
    uint4* out = static_cast<uint4*>(p.out) + first * per_row;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += JOIN_THREADS) {
        const int row = i / per_row, piece = i % p.pieces, slot = __ldg(p.slots + i % per_row / p.pieces);
        const int rank = slot / p.of_rank;
        out[i] = __ldg(x + ((rank * p.rows + first + row) * p.of_rank + (slot - rank * p.of_rank)) * p.pieces + piece);
    }
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_join_heads_launch = {s2o::JOIN_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::JOIN_THREADS)
    s2o_join_heads(const __grid_constant__ s2o::JoinHeadsParams p) {
    s2o::join_heads(p);
}
}
