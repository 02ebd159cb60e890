// Products of rows with a matrix, both in 8-bit integers with a scale a row: out = x W^T in 16 bits.
//
// A persistent block computes tiles of 128 rows and 256 outputs. Warpgroup 0 loads slices of 128 bytes along the inputs
// by TMA into a ring; warpgroups 1 and 2 multiply 64 rows each. Outputs leave by TMA during the next tile. The sums are
// exact, so they do not depend on the tiles.
#include "../decoder_row.cuh"
#include "../launch.cuh"
#include "../pair.cuh"
#include "barrier.cuh"
#include "wgmma.cuh"

namespace s2o::sm90 {

constexpr int LINEAR_ROWS = 128, LINEAR_OUTPUTS = 256, LINEAR_DEPTH = 128;  // of a tile; of a slice
constexpr int LINEAR_STAGES = 4;
constexpr int LINEAR_WARPGROUP = 128, LINEAR_THREADS = 3 * LINEAR_WARPGROUP;
constexpr uint32_t LINEAR_X_BYTES = LINEAR_ROWS * LINEAR_DEPTH, LINEAR_WEIGHT_BYTES = LINEAR_OUTPUTS * LINEAR_DEPTH;
constexpr uint32_t LINEAR_STAGE_BYTES = LINEAR_X_BYTES + LINEAR_WEIGHT_BYTES;
// Outputs leave in panels of 64 rows and 64 columns, two at a time of each warpgroup that multiplies.
constexpr int LINEAR_PANELS = 2, LINEAR_PANEL_ROWS = 64, LINEAR_PANEL_COLUMNS = 64;
constexpr uint32_t LINEAR_LINE_BYTES = LINEAR_PANEL_COLUMNS * 2, LINEAR_PANEL_BYTES = LINEAR_PANEL_ROWS * LINEAR_LINE_BYTES;
constexpr uint32_t LINEAR_SCALE_BYTES = LINEAR_OUTPUTS * 4;
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
    // The scales of rows `row` and `row + 1` of the tile's weight.
    __device__ __forceinline__ float2 two_scales(int row) const {
        float2 x;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(scales + 4 * row) : "memory");
        return x;
    }
};

// Stores four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&w)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
}

// A thread has two rows, and of each two neighbours of every eight of the weight's rows.
template <typename T, bool IS_GATED>
__device__ __forceinline__ void store_products(const CUtensorMap& map_out, const LinearRing& ring, const LinearTile& at,
                                               int warpgroup, const float (&row_scale)[2], const int32_t (&acc)[128]) {
    constexpr int APART = IS_GATED ? 16 : 8;  // rows of the weight from eight outputs to the next
    constexpr int EIGHTS = LINEAR_PANEL_COLUMNS / 8, PANELS = LINEAR_OUTPUTS / APART / EIGHTS;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, c = lane % 4;
    const bool copies = threadIdx.x % LINEAR_WARPGROUP == 0;
    const int row = warp * 16 + lane % 16;  // of the panel, whose address the lane gives
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
        const uint32_t panel = ring.panel(warpgroup, i);
        // The panel has been read when only the one before this is being read.
        if (copies) bulk_wait_read<LINEAR_PANELS - 1>();
        named_barrier_sync(1 + warpgroup, LINEAR_WARPGROUP);
#pragma unroll
        for (int two = 0; two < EIGHTS; two += 2) {
            uint32_t w[4];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const int eight = i * EIGHTS + two + b, weight_row = eight * APART + 2 * c;
                const float2 scale = ring.two_scales(weight_row);
                float2 up_scale;
                if constexpr (IS_GATED) up_scale = ring.two_scales(weight_row + 8);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int at = eight * (APART / 2) + 2 * h;
                    float low = float(acc[at]) * (row_scale[h] * scale.x);
                    float high = float(acc[at + 1]) * (row_scale[h] * scale.y);
                    if constexpr (IS_GATED) {
                        low = silu(low) * (float(acc[at + 4]) * (row_scale[h] * up_scale.x));
                        high = silu(high) * (float(acc[at + 5]) * (row_scale[h] * up_scale.y));
                    }
                    w[2 * b + h] = pack<T>(low, high);
                }
            }
            const int chunk = two + lane / 16;
            store_matrices(panel + row * LINEAR_LINE_BYTES + ((chunk ^ (row & 7)) * 16), w);
        }
        fence_proxy_async();
        named_barrier_sync(1 + warpgroup, LINEAR_WARPGROUP);
        if (copies) {
            const int column = at.output * (LINEAR_OUTPUTS * 8 / APART) + i * LINEAR_PANEL_COLUMNS;
            tma_store(&map_out, panel, column, at.row * LINEAR_ROWS + warpgroup * LINEAR_PANEL_ROWS);
            bulk_commit();
        }
    }
}

template <typename T>
__device__ __forceinline__ void linear_int8(const CUtensorMap& map_x, const CUtensorMap& map_weight,
                                            const CUtensorMap& map_out, const LinearParams& p) {
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
    const int row_tiles = (p.rows + LINEAR_ROWS - 1) / LINEAR_ROWS;
    const int output_tiles = (p.weight_rows + LINEAR_OUTPUTS - 1) / LINEAR_OUTPUTS;
    const int slices = (p.width_in + LINEAR_DEPTH - 1) / LINEAR_DEPTH;
    RingPosition<LINEAR_STAGES> pos;
    RingPosition<1> scales_pos;
    if (threadIdx.x < LINEAR_WARPGROUP) {
        registers_decrease<40>();
        if (threadIdx.x > 0) return;
        for (int tile = blockIdx.x; tile < row_tiles * output_tiles; tile += gridDim.x, scales_pos.advance()) {
            const LinearTile at(tile, row_tiles, output_tiles);
            const int weight_row = at.output * LINEAR_OUTPUTS;
            const uint32_t scale_bytes = 4 * min(LINEAR_OUTPUTS, p.weight_rows - weight_row);
            mbarrier_wait(ring.scales_empty, scales_pos.parity ^ 1);
            mbarrier_arrive_expect_tx(ring.scales_full, scale_bytes);
            bulk_load(ring.scales, p.weight_scales + weight_row, scale_bytes, ring.scales_full);
            for (int slice = 0; slice < slices; ++slice, pos.advance()) {
                const uint32_t full = ring.full + 8 * pos.stage;
                mbarrier_wait(ring.empty + 8 * pos.stage, pos.parity ^ 1);
                mbarrier_arrive_expect_tx(full, LINEAR_STAGE_BYTES);
                // The maps count in 16 bits.
                const int first = slice * (LINEAR_DEPTH / 2);
                tma_load(ring.x(pos.stage), &map_x, full, first, at.row * LINEAR_ROWS, 0, 0);
                tma_load(ring.weight(pos.stage), &map_weight, full, first, weight_row, 0, 0);
            }
        }
    } else {
        registers_increase<232>();
        const int warpgroup = threadIdx.x / LINEAR_WARPGROUP - 1;
        const bool releases = threadIdx.x % LINEAR_WARPGROUP == 0;
        for (int tile = blockIdx.x; tile < row_tiles * output_tiles; tile += gridDim.x, scales_pos.advance()) {
            const LinearTile at(tile, row_tiles, output_tiles);
            const int row = at.row * LINEAR_ROWS + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
            float row_scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) row_scale[h] = row + 8 * h < p.rows ? p.x_scales[row + 8 * h] : 0.f;
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
            mbarrier_wait(ring.scales_full, scales_pos.parity);
            if (p.is_gated) {
                store_products<T, true>(map_out, ring, at, warpgroup, row_scale, acc);
            } else {
                store_products<T, false>(map_out, ring, at, warpgroup, row_scale, acc);
            }
            if (releases) mbarrier_arrive(ring.scales_empty);
        }
        // Shared memory must last until it has been read.
        if (releases) bulk_wait_read<0>();
    }
}

}  // namespace s2o::sm90

#define S2O_LINEAR_KERNEL(suffix, T)                                                                                  \
    extern "C" {                                                                                                       \
    __constant__ s2o::LaunchInfo s2o_linear_int8_##suffix##_launch = {                                                 \
        s2o::sm90::LINEAR_THREADS, s2o::sm90::LINEAR_SHARED_BYTES, 1, 3, s2o::OVERLAPS, s2o::sm90::LINEAR_OUTPUTS};    \
    __global__ void __launch_bounds__(s2o::sm90::LINEAR_THREADS, 1)                                                    \
        s2o_linear_int8_##suffix(const __grid_constant__ CUtensorMap map_x,                                            \
                                 const __grid_constant__ CUtensorMap map_weight,                                       \
                                 const __grid_constant__ CUtensorMap map_out,                                          \
                                 const __grid_constant__ s2o::LinearParams p) {                                        \
        s2o::sm90::linear_int8<T>(map_x, map_weight, map_out, p);                                                      \
    }                                                                                                                  \
    }

S2O_LINEAR_KERNEL(bf16, __nv_bfloat16)
S2O_LINEAR_KERNEL(f16, __half)
