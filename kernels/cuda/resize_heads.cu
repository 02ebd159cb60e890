// Heads in another size: S2O's kernels have few sizes, and columns of zeros change neither scores nor outputs. Copies
// 16-byte pieces, for any 16-bit element type.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"
#include "params.cuh"

namespace s2o {

constexpr int RESIZE_THREADS = 256;
constexpr int RESIZE_ROWS = 8;  // per block

struct ResizeHeadsParams {
    const void* x;      // (batch, len, num_heads, from)
    void* out;          // (batch, len, num_heads, to), contiguous: the first columns of x, then zeros
    Strides x_strides;
    int32_t rows;       // batch * len
    int32_t len;
    int32_t num_heads;
    int32_t from;       // a multiple of 8
    int32_t to;         // a multiple of 8
};
static_assert(sizeof(ResizeHeadsParams) == 64 && offsetof(ResizeHeadsParams, rows) == 40, "mirrored on the host");

// Grid ceil(rows / RESIZE_ROWS).
__device__ __forceinline__ void resize_heads(const ResizeHeadsParams& p) {
    const int pieces = p.to / 8, per_row = p.num_heads * pieces, first = blockIdx.x * RESIZE_ROWS;
    const int count = min(RESIZE_ROWS, p.rows - first) * per_row;
    uint4* out = static_cast<uint4*>(p.out) + int64_t(first) * per_row;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += RESIZE_THREADS) {
        const int row = first + i / per_row, head = i % per_row / pieces, piece = i % pieces;
        const int batch = row / p.len;
        const Strides& s = p.x_strides;
        const int64_t element = batch * s.batch + (row - batch * p.len) * s.seq + head * s.head;
        const uint4* x = reinterpret_cast<const uint4*>(static_cast<const char*>(p.x) + 2 * element);
        out[i] = piece * 8 < p.from ? __ldg(x + piece) : make_uint4(0, 0, 0, 0);
    }
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_resize_heads_launch = {s2o::RESIZE_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::RESIZE_THREADS)
    s2o_resize_heads(const __grid_constant__ s2o::ResizeHeadsParams p) {
    s2o::resize_heads(p);
}
}
