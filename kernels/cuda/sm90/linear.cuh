// Products of rows with a matrix, or the gated product with two: out = x W^T or silu(x G^T) * (x U^T), in 16 bits.
//
// A persistent block computes tiles of 128 rows and 256 rows of the weight; with a gate, these are 128 gates and their ups.
// Warpgroup 0 loads slices of 128 bytes along the inputs by TMA into a ring; warpgroups 1 and 2 multiply 64 rows each.
// Outputs leave by TMA during the next tile, or are added to those in memory. A row's sums do not depend on the other rows.
#pragma once
#include "../decoder_row.cuh"
#include "../launch.cuh"
#include "../pair.cuh"
#include "barrier.cuh"
#include "wgmma.cuh"

namespace s2o::sm90 {

constexpr int LINEAR_ROWS = 128, LINEAR_WEIGHT_ROWS = 256;  // of a tile
constexpr int LINEAR_SLICE = 128;                           // bytes of a row
constexpr int LINEAR_STAGES = 4;
constexpr int LINEAR_WARPGROUP = 128, LINEAR_THREADS = 3 * LINEAR_WARPGROUP;
constexpr uint32_t LINEAR_X_BYTES = LINEAR_ROWS * LINEAR_SLICE, LINEAR_WEIGHT_BYTES = LINEAR_WEIGHT_ROWS * LINEAR_SLICE;
constexpr uint32_t LINEAR_STAGE_BYTES = LINEAR_X_BYTES + LINEAR_WEIGHT_BYTES;
// Outputs leave in panels of 64 rows and 64 columns, two at a time of each warpgroup that multiplies.
constexpr int LINEAR_PANELS = 2, LINEAR_PANEL_ROWS = 64, LINEAR_PANEL_COLUMNS = 64;
constexpr uint32_t LINEAR_LINE_BYTES = LINEAR_PANEL_COLUMNS * 2, LINEAR_PANEL_BYTES = LINEAR_PANEL_ROWS * LINEAR_LINE_BYTES;
constexpr uint32_t LINEAR_SCALE_BYTES = LINEAR_WEIGHT_ROWS * 4;
// With 1024 more to align the tiles, and the barriers.
constexpr uint32_t LINEAR_SHARED_BYTES = 1024 + LINEAR_STAGES * LINEAR_STAGE_BYTES + 2 * LINEAR_PANELS * LINEAR_PANEL_BYTES +
                                         LINEAR_SCALE_BYTES + (2 * LINEAR_STAGES + 2) * 8;
static_assert(LINEAR_SHARED_BYTES <= 227 * 1024, "more than a block can have");
// Row tiles that share the slices of a weight in L2.
constexpr int LINEAR_GROUP = 16;

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

// Addresses in shared memory.
struct LinearRing {
    uint32_t tiles, panels, scales, full, empty, scales_full, scales_empty;
    __device__ __forceinline__ explicit LinearRing(char* raw) {
        tiles = (smem_address(raw) + 1023) & ~1023u;
        panels = tiles + LINEAR_STAGES * LINEAR_STAGE_BYTES;
        scales = panels + 2 * LINEAR_PANELS * LINEAR_PANEL_BYTES;
        full = scales + LINEAR_SCALE_BYTES;
        empty = full + LINEAR_STAGES * 8;
        scales_full = empty + LINEAR_STAGES * 8;
        scales_empty = scales_full + 8;
    }
    __device__ __forceinline__ uint32_t x(uint32_t stage) const { return tiles + stage * LINEAR_STAGE_BYTES; }
    __device__ __forceinline__ uint32_t weight(uint32_t stage) const { return x(stage) + LINEAR_X_BYTES; }
    __device__ __forceinline__ uint32_t panel(int warpgroup, int i) const {
        return panels + (warpgroup * LINEAR_PANELS + i % LINEAR_PANELS) * LINEAR_PANEL_BYTES;
    }
    __device__ __forceinline__ uint32_t scale(int row) const { return scales + 4 * row; }
    // The scales of rows `row` and `row + 1` of the tile's weight.
    __device__ __forceinline__ float2 two_scales(int row) const {
        float2 x;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(scale(row)) : "memory");
        return x;
    }
};

// Stores four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&w)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
}

// 8-bit integers, with a scale for each row of x and of the weight.
struct Int8Numbers {
    using Sum = int32_t;
    static constexpr int BYTES = 1;
    static constexpr bool HAS_SCALES = true;
};

template <typename T>
struct PlainNumbers {
    using Sum = float;
    static constexpr int BYTES = sizeof(T);
    static constexpr bool HAS_SCALES = false;
};

// A thread has two rows, and of each two neighbours of every eight of the weight's rows.
template <class Numbers, typename T, bool IS_GATED>
__device__ __forceinline__ void store_products(const CUtensorMap& map_out, const LinearRing& ring, const LinearTile& at,
                                               int warpgroup, bool adds, const float (&row_scale)[2],
                                               const typename Numbers::Sum (&acc)[128]) {
    constexpr int OUTPUTS = IS_GATED ? LINEAR_WEIGHT_ROWS / 2 : LINEAR_WEIGHT_ROWS;
    constexpr int EIGHTS = LINEAR_PANEL_COLUMNS / 8;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, c = lane % 4;
    const bool copies = threadIdx.x % LINEAR_WARPGROUP == 0;
    const int row = warp * 16 + lane % 16;  // of the panel, whose address the lane gives
#pragma unroll
    for (int i = 0; i < OUTPUTS / LINEAR_PANEL_COLUMNS; ++i) {
        const uint32_t panel = ring.panel(warpgroup, i);
        // The panel has been read when only the one before this is being read.
        if (copies) bulk_wait_read<LINEAR_PANELS - 1>();
        named_barrier_sync(1 + warpgroup, LINEAR_WARPGROUP);
#pragma unroll
        for (int two = 0; two < EIGHTS; two += 2) {
            uint32_t w[4];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const int eight = i * EIGHTS + two + b;
                // The products with two rows of the weight, eight times `e` and more, of row h.
                auto products = [&](int e, int h) {
                    float2 x = make_float2(float(acc[4 * e + 2 * h]), float(acc[4 * e + 2 * h + 1]));
                    if constexpr (Numbers::HAS_SCALES) {
                        const float2 scale = ring.two_scales(8 * e + 2 * c);
                        x.x *= row_scale[h] * scale.x;
                        x.y *= row_scale[h] * scale.y;
                    }
                    return x;
                };
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float2 x = products(eight, h);
                    if constexpr (IS_GATED) {
                        const float2 up = products(eight + OUTPUTS / 8, h);
                        x.x = silu(x.x) * up.x;
                        x.y = silu(x.y) * up.y;
                    }
                    w[2 * b + h] = pack<T>(x.x, x.y);
                }
            }
            const int chunk = two + lane / 16;
            store_matrices(panel + row * LINEAR_LINE_BYTES + ((chunk ^ (row & 7)) * 16), w);
        }
        fence_proxy_async();
        named_barrier_sync(1 + warpgroup, LINEAR_WARPGROUP);
        if (copies) {
            const int column = at.output * OUTPUTS + i * LINEAR_PANEL_COLUMNS;
            const int token = at.row * LINEAR_ROWS + warpgroup * LINEAR_PANEL_ROWS;
            if (!IS_GATED && adds) {
                tma_add(&map_out, panel, column, token);
            } else {
                tma_store(&map_out, panel, column, token);
            }
            bulk_commit();
        }
    }
}

template <class Numbers, typename T, bool IS_GATED>
__device__ __forceinline__ void linear(const CUtensorMap& map_x, const CUtensorMap& map_weight,
                                       const CUtensorMap& map_out, const LinearParams& p) {
    // Parts of a tile's weight: gates and ups, or one.
    constexpr int PARTS = IS_GATED ? 2 : 1, PART_ROWS = LINEAR_WEIGHT_ROWS / PARTS;
    extern __shared__ char raw[];
    const LinearRing ring(raw);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&map_x);
        tma_prefetch_map(&map_weight);
        tma_prefetch_map(&map_out);
        for (int i = 0; i < LINEAR_STAGES; ++i) {
            mbarrier_init(ring.full + 8 * i, 1);
            mbarrier_init(ring.empty + 8 * i, 2);
        }
        mbarrier_init(ring.scales_full, 1);
        mbarrier_init(ring.scales_empty, 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_proxy_async();
    }
    __syncthreads();
    overlap();
    const int size = p.weight_rows / PARTS;
    const int row_tiles = (p.rows + LINEAR_ROWS - 1) / LINEAR_ROWS, output_tiles = (size + PART_ROWS - 1) / PART_ROWS;
    const int slices = (p.width_in * Numbers::BYTES + LINEAR_SLICE - 1) / LINEAR_SLICE;
    RingPosition<LINEAR_STAGES> pos;
    RingPosition<1> scales_pos;
    if (threadIdx.x < LINEAR_WARPGROUP) {
        registers_decrease<40>();
        if (threadIdx.x > 0) return;
        for (int tile = blockIdx.x; tile < row_tiles * output_tiles; tile += gridDim.x, scales_pos.advance()) {
            const LinearTile at(tile, row_tiles, output_tiles);
            const int output = at.output * PART_ROWS;
            for (int slice = 0; slice < slices; ++slice, pos.advance()) {
                const uint32_t full = ring.full + 8 * pos.stage;
                mbarrier_wait(ring.empty + 8 * pos.stage, pos.parity ^ 1);
                mbarrier_arrive_expect_tx(full, LINEAR_STAGE_BYTES);
                // The maps count in 16 bits.
                const int first = slice * (LINEAR_SLICE / 2);
                tma_load(ring.x(pos.stage), &map_x, full, first, at.row * LINEAR_ROWS, 0, 0);
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    tma_load(ring.weight(pos.stage) + i * (PART_ROWS * LINEAR_SLICE), &map_weight, full, first,
                             i * size + output, 0, 0);
                }
            }
            // After the slices, so that those of a tile are loaded while the outputs of the one before are stored.
            if constexpr (Numbers::HAS_SCALES) {
                const uint32_t bytes = 4 * min(PART_ROWS, size - output);
                mbarrier_wait(ring.scales_empty, scales_pos.parity ^ 1);
                mbarrier_arrive_expect_tx(ring.scales_full, PARTS * bytes);
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    bulk_load(ring.scale(i * PART_ROWS), p.weight_scales + i * size + output, bytes, ring.scales_full);
                }
            }
        }
    } else {
        registers_increase<232>();
        const int warpgroup = threadIdx.x / LINEAR_WARPGROUP - 1;
        const bool releases = threadIdx.x % LINEAR_WARPGROUP == 0;
        for (int tile = blockIdx.x; tile < row_tiles * output_tiles; tile += gridDim.x, scales_pos.advance()) {
            const LinearTile at(tile, row_tiles, output_tiles);
            float row_scale[2];
            if constexpr (Numbers::HAS_SCALES) {
                const int row =
                    at.row * LINEAR_ROWS + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
                for (int h = 0; h < 2; ++h) row_scale[h] = row + 8 * h < p.rows ? p.x_scales[row + 8 * h] : 0.f;
            }
            typename Numbers::Sum acc[128];
            uint32_t last = 0;
            for (int slice = 0; slice < slices; ++slice, pos.advance()) {
                mbarrier_wait(ring.full + 8 * pos.stage, pos.parity);
                const uint32_t x = uniform(descriptor_k_major(ring.x(pos.stage) + warpgroup * (64 * LINEAR_SLICE)));
                const uint32_t weight = uniform(descriptor_k_major(ring.weight(pos.stage)));
                pin(acc);
                wgmma_fence();
                // Each product takes 32 bytes of the rows.
#pragma unroll
                for (int k = 0; k < LINEAR_SLICE; k += 32) {
                    wgmma_256<T>(acc, x + descriptor_step(k), weight + descriptor_step(k), slice + k);
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
            if constexpr (Numbers::HAS_SCALES) mbarrier_wait(ring.scales_full, scales_pos.parity);
            store_products<Numbers, T, IS_GATED>(map_out, ring, at, warpgroup, p.adds, row_scale, acc);
            if (Numbers::HAS_SCALES && releases) mbarrier_arrive(ring.scales_empty);
        }
        // Shared memory must last until it has been read.
        if (releases) bulk_wait_read<0>();
    }
}

}  // namespace s2o::sm90

// The box of the weight's map has LINEAR_WEIGHT_ROWS rows, with a gate half as many.
#define S2O_LINEAR_KERNEL(name, Numbers, T, IS_GATED)                                                                 \
    extern "C" {                                                                                                      \
    __constant__ s2o::LaunchInfo name##_launch = {                                                                    \
        s2o::sm90::LINEAR_THREADS, s2o::sm90::LINEAR_SHARED_BYTES, 1, 3, s2o::OVERLAPS, s2o::sm90::LINEAR_WEIGHT_ROWS}; \
    __global__ void __launch_bounds__(s2o::sm90::LINEAR_THREADS, 1)                                                   \
        name(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,               \
             const __grid_constant__ CUtensorMap map_out, const __grid_constant__ s2o::LinearParams p) {              \
        s2o::sm90::linear<s2o::sm90::Numbers, T, IS_GATED>(map_x, map_weight, map_out, p);                            \
    }                                                                                                                 \
    }
