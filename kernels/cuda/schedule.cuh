// Which query tile an item number means, and which key tiles it visits. Persistent CTAs take item numbers from one
// counter; low numbers are the longest items, so that the launch ends evenly.
//
// Causal query tiles are cut at multiples of TILE_Q of the ABSOLUTE position, not of the query row: then only a tile's
// own diagonal key tile needs a mask, no row is ever without a key, and no tile straddles a segment. The first tile
// of a chunk may begin at a negative query row; TMA reads zeros there and nothing is stored.
#pragma once
#include <cstdint>

#include "params.cuh"

namespace s2o {

struct WorkItem {
    int batch, head, kv_head;
    int q_start;           // query row of the tile's first row, may be negative
    int window_last;       // key tile of step 0; step i < num_window visits window_last - i
    int num_window;
    int num_prefix;        // gathered tiles after the window
    int tail_limit;        // last valid column of step 0 when not causal
    int tile;
    const int32_t* kv_perm;
};

struct TileGrid {
    int offset, first, count;
    __device__ __forceinline__ explicit TileGrid(const DenseParams& p) {
        offset = p.causal ? p.k_len - p.q_len : 0;
        first = offset / TILE_Q;
        count = (offset + p.q_len - 1) / TILE_Q - first + 1;
    }
};

// Dense: sections of heads whose keys and values fit in L2 together; in a section the last tiles first.
struct DenseSchedule {
    using Params = DenseParams;
    __device__ static const DenseParams& dense(const Params& p) { return p; }
    __device__ static int num_items(const Params& p) { return TileGrid(p).count * p.batch * p.num_heads; }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const TileGrid grid(p);
        const int section_items = p.heads_per_section * grid.count;
        const int section = item / section_items;
        const int in_section = item - section * section_items;
        const int first_head = section * p.heads_per_section;
        const int heads = min(p.heads_per_section, p.batch * p.num_heads - first_head);
        const int row = in_section / heads;
        const int batch_head = first_head + in_section - row * heads;
        w.batch = batch_head / p.num_heads;
        w.head = batch_head - w.batch * p.num_heads;
        w.kv_head = w.head / (p.num_heads / p.num_kv_heads);
        w.tile = grid.first + grid.count - 1 - row;
        w.q_start = w.tile * TILE_Q - grid.offset;
        w.window_last = p.causal ? w.tile : (p.k_len - 1) / TILE_K;
        w.num_window = w.window_last + 1;
        w.num_prefix = 0;
        w.tail_limit = p.k_len - 1 - w.window_last * TILE_K;
        w.kv_perm = nullptr;
        return true;
    }
};

// S2O: the last segments first (their prefixes are the longest); the tiles of one head and segment together, because
// they gather the same rows.
struct SparseSchedule {
    using Params = SparseParams;
    __device__ static const DenseParams& dense(const Params& p) { return p.dense; }
    __device__ static int num_items(const Params& p) {
        const TileGrid grid(p.dense);
        const int tiles = p.segment_len / TILE_Q;
        const int segments = (grid.first + grid.count - 1) / tiles - grid.first / tiles + 1;
        return segments * tiles * p.dense.batch * p.dense.num_heads;
    }

    // False for the slots before a chunk's first tile and after the last one.
    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const TileGrid grid(p.dense);
        const int tiles = p.segment_len / TILE_Q;
        const int per_segment = tiles * p.dense.batch * p.dense.num_heads;
        const int first_segment = grid.first / tiles;
        const int last_segment = (grid.first + grid.count - 1) / tiles;
        const int back = item / per_segment;
        const int in_segment = item - back * per_segment;
        const int segment = last_segment - back;
        // The first segment gathers nothing and ends the launch: there strictly the longest first.
        const int heads = p.dense.batch * p.dense.num_heads;
        const int batch_head = segment == 0 ? in_segment % heads : in_segment / tiles;
        const int back_in_segment = segment == 0 ? in_segment / heads : in_segment - batch_head * tiles;
        w.batch = batch_head / p.dense.num_heads;
        w.head = batch_head - w.batch * p.dense.num_heads;
        w.kv_head = w.head / (p.dense.num_heads / p.dense.num_kv_heads);
        w.tile = segment * tiles + tiles - 1 - back_in_segment;
        w.q_start = w.tile * TILE_Q - grid.offset;
        w.window_last = w.tile;
        w.num_window = w.tile - segment * tiles + 1;
        w.num_prefix = segment * (p.segment_len / TILE_K);
        w.tail_limit = 0;
        // Row n holds n*S entries: rows first_segment..segment-1 come before.
        const int64_t before = (int64_t(segment) * (segment - 1) - int64_t(first_segment) * (first_segment - 1)) / 2;
        w.kv_perm = p.kv_perm + batch_head * p.kv_perm_head_stride + before * p.segment_len;
        return w.tile >= grid.first && w.tile < grid.first + grid.count;
    }
};

}  // namespace s2o
