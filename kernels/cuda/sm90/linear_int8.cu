// Products of rows with a matrix, both in 8-bit integers with a scale a row: out = x W^T in 16 bits.
//
// A persistent block computes tiles of 128 rows and 256 outputs. Warpgroup 0 loads slices of 128 bytes along the inputs
// by TMA into a ring; warpgroups 1 and 2 multiply 64 rows each. The sums are exact, so they do not depend on the tiles.
#include "../decoder_row.cuh"
#include "../launch.cuh"
#include "../pair.cuh"
#include "barrier.cuh"
#include "quad.cuh"
#include "wgmma.cuh"

namespace s2o::sm90 {

constexpr int LINEAR_ROWS = 128, LINEAR_OUTPUTS = 256, LINEAR_DEPTH = 128;  // of a tile; of a slice
constexpr int LINEAR_STAGES = 4;
constexpr int LINEAR_WARPGROUP = 128, LINEAR_THREADS = 3 * LINEAR_WARPGROUP;
constexpr uint32_t LINEAR_X_BYTES = LINEAR_ROWS * LINEAR_DEPTH, LINEAR_WEIGHT_BYTES = LINEAR_OUTPUTS * LINEAR_DEPTH;
constexpr uint32_t LINEAR_STAGE_BYTES = LINEAR_X_BYTES + LINEAR_WEIGHT_BYTES;
// With 1024 more to align the tiles, and the barriers.
constexpr uint32_t LINEAR_SHARED_BYTES = 1024 + LINEAR_STAGES * LINEAR_STAGE_BYTES + 2 * LINEAR_STAGES * 8;
// Row tiles that share the slices of a weight in L2.
constexpr int LINEAR_GROUP = 8;

// The position of a tile, in tiles: groups of row tiles, by outputs within a group.
struct LinearTile {
    int row, output;
    __device__ __forceinline__ LinearTile(int tile, int row_tiles, int output_tiles) {
        const int group = tile / (LINEAR_GROUP * output_tiles), within = tile % (LINEAR_GROUP * output_tiles);
        const int rows = min(LINEAR_GROUP, row_tiles - group * LINEAR_GROUP);
        row = group * LINEAR_GROUP + within % rows;
        output = within / rows;
    }
};

struct LinearRing {
    uint32_t tiles, full, empty;
    __device__ __forceinline__ explicit LinearRing(char* raw) {
        tiles = (smem_address(raw) + 1023) & ~1023u;
        full = tiles + LINEAR_STAGES * LINEAR_STAGE_BYTES;
        empty = full + LINEAR_STAGES * 8;
    }
    __device__ __forceinline__ uint32_t x(uint32_t stage) const { return tiles + stage * LINEAR_STAGE_BYTES; }
    __device__ __forceinline__ uint32_t weight(uint32_t stage) const { return x(stage) + LINEAR_X_BYTES; }
};

// A thread has two rows, and of each two neighbours of every eight of the weight's rows.
template <typename T, bool IS_GATED>
__device__ __forceinline__ void store_products(const LinearParams& p, const LinearTile& at, const int32_t (&acc)[128]) {
    constexpr int APART = IS_GATED ? 16 : 8;  // rows of the weight from eight outputs to the next
    const int warp = threadIdx.x / 32 - LINEAR_WARPGROUP / 32, lane = threadIdx.x % 32, c = lane % 4;
    const int row0 = at.row * LINEAR_ROWS + warp * 16 + lane / 4, first = at.output * LINEAR_OUTPUTS;
    const int width = IS_GATED ? p.weight_rows / 2 : p.weight_rows;
    float row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) row_scale[h] = row0 + 8 * h < p.rows ? p.x_scales[row0 + 8 * h] : 0.f;
    auto scales = [&](int row) {
        return row < p.weight_rows ? *reinterpret_cast<const float2*>(p.weight_scales + row) : make_float2(0.f, 0.f);
    };
#pragma unroll
    for (int g = 0; g < LINEAR_OUTPUTS / (4 * APART); ++g) {
        float2 scale[4], up_scale[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            scale[b] = scales(first + (4 * g + b) * APART + 2 * c);
            if constexpr (IS_GATED) up_scale[b] = scales(first + (4 * g + b) * APART + 8 + 2 * c);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t w[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int i = (4 * g + b) * (APART / 2) + 2 * h;
                float low = float(acc[i]) * (row_scale[h] * scale[b].x);
                float high = float(acc[i + 1]) * (row_scale[h] * scale[b].y);
                if constexpr (IS_GATED) {
                    low = silu(low) * (float(acc[i + 4]) * (row_scale[h] * up_scale[b].x));
                    high = silu(high) * (float(acc[i + 5]) * (row_scale[h] * up_scale[b].y));
                }
                w[b] = pack<T>(low, high);
            }
            transpose_quad(w, c);
            const int row = row0 + 8 * h, column = first * 8 / APART + 32 * g + 8 * c;
            if (row < p.rows && column < width) {
                T* out = static_cast<T*>(p.out) + int64_t(row) * width + column;
                *reinterpret_cast<uint4*>(out) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void linear_int8(const CUtensorMap& map_x, const CUtensorMap& map_weight,
                                            const LinearParams& p) {
    extern __shared__ char raw[];
    const LinearRing ring(raw);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&map_x);
        tma_prefetch_map(&map_weight);
        for (int i = 0; i < LINEAR_STAGES; ++i) {
            mbarrier_init(ring.full + 8 * i, 1);
            mbarrier_init(ring.empty + 8 * i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_proxy_async();
    }
    __syncthreads();
    overlap();
    const int row_tiles = (p.rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    const int output_tiles = (p.weight_rows + LINEAR_OUTPUTS - 1) / LINEAR_OUTPUTS;
    const int slices = (p.width_in + LINEAR_DEPTH - 1) / LINEAR_DEPTH;
    RingPosition<LINEAR_STAGES> pos;
    if (threadIdx.x < LINEAR_WARPGROUP) {
        registers_decrease<40>();
        if (threadIdx.x > 0) return;
        for (int tile = blockIdx.x; tile < row_tiles * output_tiles; tile += gridDim.x) {
            const LinearTile at(tile, row_tiles, output_tiles);
            for (int slice = 0; slice < slices; ++slice, pos.advance()) {
                const uint32_t full = ring.full + 8 * pos.stage;
                mbarrier_wait(ring.empty + 8 * pos.stage, pos.parity ^ 1);
                mbarrier_arrive_expect_tx(full, LINEAR_STAGE_BYTES);
                // The maps count in 16 bits.
                const int first = slice * (LINEAR_DEPTH / 2);
                tma_load(ring.x(pos.stage), &map_x, full, first, at.row * LINEAR_ROWS, 0, 0);
                tma_load(ring.weight(pos.stage), &map_weight, full, first, at.output * LINEAR_OUTPUTS, 0, 0);
            }
        }
    } else {
        registers_increase<232>();
        const int warpgroup = threadIdx.x / LINEAR_WARPGROUP - 1;
        const bool releases = threadIdx.x % LINEAR_WARPGROUP == 0;
        for (int tile = blockIdx.x; tile < row_tiles * output_tiles; tile += gridDim.x) {
            const LinearTile at(tile, row_tiles, output_tiles);
            int32_t acc[128];
            uint32_t last = 0;
            for (int slice = 0; slice < slices; ++slice, pos.advance()) {
                mbarrier_wait(ring.full + 8 * pos.stage, pos.parity);
                const uint32_t x = uniform(descriptor_k_major(ring.x(pos.stage) + warpgroup * (64 * LINEAR_DEPTH)));
                const uint32_t weight = uniform(descriptor_k_major(ring.weight(pos.stage)));
                pin(acc);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < LINEAR_DEPTH / 32; ++k) {
                    wgmma_int8(acc, x + descriptor_step(32 * k), weight + descriptor_step(32 * k), slice + k);
                }
                wgmma_commit();
                // The slice before has been read when only this one is left.
                wgmma_wait<1>();
                if (releases && slice > 0) mbarrier_arrive(ring.empty + 8 * last);
                last = pos.stage;
            }
            wgmma_wait<0>();
            pin(acc);
            if (releases) mbarrier_arrive(ring.empty + 8 * last);
            if (p.is_gated) {
                store_products<T, true>(p, at, acc);
            } else {
                store_products<T, false>(p, at, acc);
            }
        }
    }
}

}  // namespace s2o::sm90

#define S2O_LINEAR_KERNEL(suffix, T)                                                                                  \
    extern "C" {                                                                                                       \
    __constant__ s2o::LaunchInfo s2o_linear_int8_##suffix##_launch = {                                                 \
        s2o::sm90::LINEAR_THREADS, s2o::sm90::LINEAR_SHARED_BYTES, 1, 2, s2o::OVERLAPS, s2o::sm90::LINEAR_OUTPUTS};    \
    __global__ void __launch_bounds__(s2o::sm90::LINEAR_THREADS, 1)                                                    \
        s2o_linear_int8_##suffix(const __grid_constant__ CUtensorMap map_x,                                            \
                                 const __grid_constant__ CUtensorMap map_weight,                                       \
                                 const __grid_constant__ s2o::LinearParams p) {                                        \
        s2o::sm90::linear_int8<T>(map_x, map_weight, p);                                                               \
    }                                                                                                                  \
    }

S2O_LINEAR_KERNEL(bf16, __nv_bfloat16)
S2O_LINEAR_KERNEL(f16, __half)
