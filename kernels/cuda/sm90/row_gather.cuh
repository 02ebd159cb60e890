// Coordinate-scheduled loading: the 128 threads of the producer warpgroup copy one tile of TILE_K rows, named by an
// index list, to the same swizzled panels that TMA fills.
//
// Eight lanes copy one 128-byte line of a row. Thread t copies to lines t/8, t/8 + 16, ...: their low three bits are
// equal, so the thread's swizzled chunk is constant and every address is a constant away from the first.
#pragma once
#include <cstdint>

#include "../params.cuh"
#include "barrier.cuh"

namespace s2o::sm90 {

template <int HEAD_DIM>
struct RowGather {
    static constexpr int PANELS = HEAD_DIM / 64;
    static constexpr int PANEL_BYTES = TILE_K * 128;
    static constexpr int LINES_APART = 16;
    static constexpr int ROWS_PER_THREAD = TILE_K / LINES_APART;

    int slot;             // row of the tile whose index this thread fetches
    uint32_t offset;      // of this thread's chunk of its first line
    uint32_t chunk_bytes; // of the same chunk in the source row

    __device__ __forceinline__ explicit RowGather(int thread) {
        const int line = thread / 8, chunk = thread % 8;
        slot = line + LINES_APART * chunk;
        offset = line * 128 + ((chunk ^ (line & 7)) * 16);
        chunk_bytes = chunk * 16;
    }

    // `index`: the token of row `slot`. The eight lanes of a line hold the tokens of its eight rows and exchange them.
    __device__ __forceinline__ void load(uint32_t tile, const char* rows, uint32_t row_bytes, int index) const {
        const int group = (threadIdx.x % 32) & 24;
        const char* base = rows + chunk_bytes;
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) {
            const uint32_t token = __shfl_sync(0xffffffffu, index, group | i);
            const char* row = base + uint64_t(token) * row_bytes;
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                cp_async_16(tile + offset + i * (LINES_APART * 128) + panel * PANEL_BYTES, row + panel * 128);
            }
        }
    }
};

}  // namespace s2o::sm90
