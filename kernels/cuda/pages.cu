// Keys and values of one sequence out of pages, side by side: S2O ranks and gathers them by row. Copies whole heads in
// 16-byte pieces, for any 16-bit element type.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"
#include "params.cuh"

namespace s2o {

constexpr int PAGES_THREADS = 256;
constexpr int PAGES_ROWS = 8;  // per block

struct PagesParams {
    const void* k;         // (num_pages, page_len, num_heads, head_dim); the strides' batch is a page
    const void* v;         // as k
    const int32_t* table;  // the pages of the sequence, in order
    void* k_out;           // (len, num_heads, head_dim)
    void* v_out;           // as k_out
    Strides k_strides;
    Strides v_strides;
    int32_t num_pages;
    int32_t page_len;
    int32_t num_heads;
    int32_t head_dim;      // a multiple of 8
    int32_t len;
};
static_assert(sizeof(PagesParams) == 112 && offsetof(PagesParams, num_pages) == 88, "mirrored on the host");

// Grid ceil(len / PAGES_ROWS).
__device__ __forceinline__ void pages(const PagesParams& p) {
    const int pieces = p.head_dim / 8, per_row = p.num_heads * pieces, first = blockIdx.x * PAGES_ROWS;
    const int count = min(PAGES_ROWS, p.len - first) * per_row;
    const int64_t out = int64_t(first) * per_row;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += PAGES_THREADS) {
        const int row = first + i / per_row, head = i % per_row / pieces, piece = i % pieces;
        // Clamped, so that a wrong page reads nothing beyond the pages.
        const int page = min(max(__ldg(p.table + row / p.page_len), 0), p.num_pages - 1);
        auto copy = [&](const void* from, const Strides& strides, void* to) {
            const int64_t element = page * strides.batch + row % p.page_len * strides.seq + head * strides.head;
            static_cast<uint4*>(to)[out + i] =
                __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(from) + 2 * element) + piece);
        };
        copy(p.k, p.k_strides, p.k_out);
        copy(p.v, p.v_strides, p.v_out);
    }
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_pages_launch = {s2o::PAGES_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::PAGES_THREADS) s2o_pages(const __grid_constant__ s2o::PagesParams p) {
    s2o::pages(p);
}
}
