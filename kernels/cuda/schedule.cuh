// The query tile of each item number and the key tiles that it visits. Persistent CTAs take item numbers from one
// counter; low numbers are the longest items, so that the launch ends evenly.
//
// Causal query tiles are cut at multiples of TILE_Q of the ABSOLUTE position, not of the query row. Only a tile's own
// diagonal key tile then needs a mask, every row has a key, and no tile straddles a segment. The first tile of a chunk
// may begin at a negative query row; such rows read as zeros and are not stored.
#pragma once
#include <cstdint>

#include "params.cuh"
#include "probe_params.cuh"

namespace s2o {

// One of several sequences in one tensor.
struct Sequence {
    int first_row;  // of the call
    int first_key;  // with pages: first entry in the table
    int k_len;
};

struct WorkItem {
    int batch, head, kv_head;
    int q_start;             // row of the call, or slot of q_perm, of the tile's first row; may be negative
    int row_end;             // rows from here on do not belong to the tile
    Sequence sequence;       // of the rows if the schedule has SEQUENCES
    int position;            // of the tile's first row; bounds its visible keys if causal
    int last_position;       // if the rows are scattered: a bound on their positions; `position` is another
    int key_tile;            // of step 0
    int steps;               // key tiles to visit, gathered ones included
    int gather_from;         // steps from here on take their rows from kv_perm
    int last_keys;           // keys of the last gathered tile if the schedule has RAGGED_END
    const int32_t* kv_perm;  // tokens of steps gather_from and later
    const int32_t* key_blocks;
    int64_t slot;            // index of per-tile results

    __device__ __forceinline__ int batch_head(const AttnParams& p) const { return batch * p.num_heads + head; }
    __device__ __forceinline__ void set_head(const AttnParams& p, int batch_head) {
        batch = batch_head / p.num_heads;
        head = batch_head - batch * p.num_heads;
        kv_head = head / (p.num_heads / p.num_kv_heads);
    }
};

// The query tiles of a call.
struct TileGrid {
    int offset, first, count;
    __device__ __forceinline__ explicit TileGrid(const AttnParams& p) {
        offset = p.causal ? p.k_len - p.q_len : 0;
        first = offset / TILE_Q;
        count = (offset + p.q_len - 1) / TILE_Q - first + 1;
    }
};

// Items go by sections of heads whose keys and values fit in L2 together, the last tiles first. Returns the tile.
__device__ __forceinline__ int decode_sections(const AttnParams& p, const TileGrid& grid, int item, WorkItem& w) {
    const int section_items = p.heads_per_section * grid.count;
    const int section = item / section_items;
    const int in_section = item - section * section_items;
    const int first_head = section * p.heads_per_section;
    const int heads = min(p.heads_per_section, p.batch * p.num_heads - first_head);
    const int row = in_section / heads;
    w.set_head(p, first_head + in_section - row * heads);
    const int tile = grid.first + grid.count - 1 - row;
    w.q_start = tile * TILE_Q - grid.offset;
    w.row_end = p.q_len;
    w.position = tile * TILE_Q;
    return tile;
}

// The AttnParams in the parameters of any kernel.
__device__ __forceinline__ const AttnParams& attn_of(const AttnParams& p) { return p; }
__device__ __forceinline__ const AttnParams& attn_of(const ColumnParams& p) { return p.block.attn; }
__device__ __forceinline__ const AttnParams& attn_of(const ProbeParams& p) { return p.split.attn; }
template <class Params>
__device__ __forceinline__ const AttnParams& attn_of(const Params& p) {
    return p.attn;
}

__device__ __forceinline__ const SplitParams& split_of(const SplitParams& p) { return p; }
__device__ __forceinline__ const SplitParams& split_of(const ProbeParams& p) { return p.split; }

enum class Output {
    NORMALISED,  // attention
    STATEFUL,    // attention, and the row states from which pass 2 resumes
    PARTIAL,     // accumulators and row states, to be merged
    RESUMED,     // pass 2: joined with the output of pass 1
};

// Compile-time properties of a schedule. Each schedule redefines those that differ.
struct Schedule {
    static constexpr Output OUTPUT = Output::NORMALISED;
    static constexpr bool GATHERS_KEYS = false;        // in steps from WorkItem::gather_from on
    static constexpr bool RAGGED_END = false;          // the last gathered tile has WorkItem::last_keys keys
    static constexpr bool PERMUTES_QUERIES = false;    // q_perm names the rows of a tile
    static constexpr bool MAY_STOP = false;            // S2O: gathered steps may end early, and are counted
    static constexpr bool ITEMS_MAY_BE_EMPTY = false;  // an item may have no steps
    static constexpr bool ROWS_MAY_BE_EMPTY = false;   // a row may see no key of a tile; any step may need a mask
    static constexpr bool MODIFIES_SCORES = false;     // softcap or ALiBi; Params are FlashParams
    static constexpr bool CAPS_SCORES = false;         // softcap, in the portable engine
    static constexpr bool SCATTERS_ROWS = false;       // the positions of a tile's rows are not consecutive
    static constexpr bool SEQUENCES = false;           // WorkItem::sequence bounds rows and keys
    static constexpr bool PAGED = false;               // keys and values are in pages; Params are FlashParams
    static constexpr bool NARROW_HEADS = false;        // heads may be narrower than the kernel's head_dim

    // Descending, so that the diagonal tile, the only tile with a mask, comes first.
    __device__ static int key_tile(const WorkItem& w, int step) { return w.key_tile - step; }
    // Position of row `row` of a tile.
    template <class Params>
    __device__ __forceinline__ static int position(const Params&, const WorkItem& w, int row) {
        return w.position + row;
    }
};

template <class S>
struct Capped : S {
    static constexpr bool CAPS_SCORES = true;
};

struct DenseSchedule : Schedule {
    using Params = AttnParams;
    __device__ static int num_items(const Params& p) { return TileGrid(p).count * p.batch * p.num_heads; }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const int tile = decode_sections(p, TileGrid(p), item, w);
        w.key_tile = p.causal ? tile : (p.k_len - 1) / TILE_K;
        w.steps = w.gather_from = w.key_tile + 1;
        return true;
    }
};

struct BlockSchedule : Schedule {
    using Params = BlockParams;
    static constexpr bool ITEMS_MAY_BE_EMPTY = true;
    __device__ static int num_items(const Params& p) { return DenseSchedule::num_items(p.attn); }
    __device__ static int key_tile(const WorkItem& w, int step) { return w.key_blocks[step]; }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const TileGrid grid(p.attn);
        const int tile = decode_sections(p.attn, grid, item, w);
        w.slot = int64_t(w.batch_head(p.attn)) * grid.count + tile - grid.first;
        const int64_t* range = p.block_ranges + 2 * w.slot;
        w.key_blocks = p.key_blocks + range[0];
        w.steps = w.gather_from = int(range[1] - range[0]);
        w.key_tile = w.steps > 0 ? w.key_blocks[0] : 0;
        return true;
    }
};

// BlockSchedule with single keys after the blocks.
struct ColumnSchedule : BlockSchedule {
    using Params = ColumnParams;
    static constexpr bool GATHERS_KEYS = true, RAGGED_END = true;
    __device__ static int num_items(const Params& p) { return BlockSchedule::num_items(p.block); }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        BlockSchedule::decode(p.block, item, w);
        const int columns = p.column_counts[w.slot];
        w.kv_perm = p.columns + w.slot * p.column_stride;
        w.steps = w.gather_from + (columns + TILE_K - 1) / TILE_K;
        w.last_keys = columns - (w.steps - w.gather_from - 1) * TILE_K;
        return true;
    }
};

// Every query against every key in the order of kv_perm, not causal: the paper's ladder without causality. A head has
// one order, and k_len is a multiple of TILE_K.
struct LadderSchedule : Schedule {
    using Params = S2oParams;
    static constexpr bool GATHERS_KEYS = true, MAY_STOP = true;
    __device__ static int num_items(const Params& p) { return DenseSchedule::num_items(p.attn); }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const TileGrid grid(p.attn);
        const int tile = decode_sections(p.attn, grid, item, w);
        w.key_tile = 0;
        w.gather_from = p.first_segment;  // 0, hidden from the compiler to keep the loop of the causal kernel
        w.steps = p.attn.k_len / TILE_K;
        w.kv_perm = p.kv_perm + w.batch_head(p.attn) * p.kv_perm_head_stride;
        w.slot = int64_t(w.batch_head(p.attn)) * grid.count + tile;
        return true;
    }
};

// One split of one tile of rows first_row and later. All splits except the last have the same length.
struct SplitSchedule : Schedule {
    using Params = SplitParams;
    static constexpr Output OUTPUT = Output::PARTIAL;
    static constexpr bool ITEMS_MAY_BE_EMPTY = true, ROWS_MAY_BE_EMPTY = true;

    __device__ static int row_tiles(const Params& p) { return (p.attn.q_len - p.first_row + TILE_Q - 1) / TILE_Q; }
    __device__ static int num_items(const Params& p) {
        return row_tiles(p) * p.num_splits * p.attn.batch * p.attn.num_heads;
    }
    // Ascending: the mask is in the last steps.
    __device__ static int key_tile(const WorkItem& w, int step) { return w.key_tile + step; }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const int split = item % p.num_splits, rest = item / p.num_splits;
        const int tile = rest % row_tiles(p);
        w.set_head(p.attn, rest / row_tiles(p));
        w.q_start = p.first_row + tile * TILE_Q;
        w.row_end = p.attn.q_len;
        w.position = p.attn.k_len - p.attn.q_len + w.q_start;
        const int last_row = min(w.q_start + TILE_Q, p.attn.q_len) - 1;
        const int last_key = p.attn.causal ? w.position + last_row - w.q_start : p.attn.k_len - 1;
        w.key_tile = split * p.tiles_per_split;
        w.steps = w.gather_from = max(0, min(p.tiles_per_split, last_key / TILE_K + 1 - w.key_tile));
        w.slot = (int64_t(w.batch_head(p.attn)) * row_tiles(p) + tile) * p.num_splits + split;
        return true;
    }
};

// SplitSchedule for the probes. The tiles that read the same keys are neighbours, so that the keys stay in L2; the first
// keys, which all tiles see, come first. The rows are ordered by run and have any positions in their runs.
struct ProbeSchedule : SplitSchedule {
    using Params = ProbeParams;
    static constexpr bool SCATTERS_ROWS = true;

    __device__ static int num_items(const Params& p) { return SplitSchedule::num_items(p.split); }
    __device__ __forceinline__ static int position(const Params& p, const WorkItem& w, int row) {
        const AttnParams& attn = p.split.attn;
        const int at = min(w.q_start + row, attn.q_len - 1);
        const int64_t head = (int64_t(w.batch) * attn.num_heads + w.head) * p.group + at % p.group;
        return p.positions[head * (p.group_segments * p.slots) + at / p.group];
    }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const SplitParams& of = p.split;
        const int tiles = row_tiles(of), heads = of.attn.batch * of.attn.num_heads;
        const int tile = item % tiles, rest = item / tiles;
        const int head = rest % heads, split = rest / heads;
        w.set_head(of.attn, head);
        w.q_start = tile * TILE_Q;
        w.row_end = of.attn.q_len;
        w.position = min(run_of(p, w.q_start / p.group).begin, of.attn.k_len - 1);
        w.key_tile = split * of.tiles_per_split;
        const int last_row = min(w.q_start + TILE_Q, of.attn.q_len) - 1;
        w.last_position = min(max(run_of(p, last_row / p.group).end, w.position + 1), of.attn.k_len) - 1;
        const int end = w.last_position / TILE_K + 1;
        w.steps = w.gather_from = max(0, min(of.tiles_per_split, end - w.key_tile));
        w.slot = (int64_t(head) * tiles + tile) * of.num_splits + split;
        return true;
    }
};

// S2O: the last segments come first, because their prefixes are the longest. The tiles of one head and segment stay
// together, because they gather the same rows.
__device__ __forceinline__ void decode_segments(const S2oParams& p, int item, WorkItem& w, int& segment, int& tile) {
    const int tiles = p.segment_len / TILE_Q;
    const int heads = p.attn.batch * p.attn.num_heads;
    const int offset = p.attn.k_len - p.attn.q_len;
    const int call_segment = offset / p.segment_len;
    const int call_segments = (p.attn.k_len - 1) / p.segment_len - call_segment + 1;
    int batch_head, back_in_segment;
    if (p.units.units != nullptr) {
        const int unit = p.units.units[item / tiles];
        batch_head = unit / call_segments;
        segment = call_segment + unit - batch_head * call_segments;
        back_in_segment = item % tiles;
    } else {
        const int back = item / (tiles * heads);
        const int in_segment = item - back * tiles * heads;
        segment = p.first_segment + p.num_segments - 1 - back;
        // The first segment gathers nothing and ends the launch, so its order is strictly longest first.
        batch_head = segment == 0 ? in_segment % heads : in_segment / tiles;
        back_in_segment = segment == 0 ? in_segment / heads : in_segment - batch_head * tiles;
    }
    w.set_head(p.attn, batch_head);
    tile = tiles - 1 - back_in_segment;
    w.row_end = p.ranked_rows;
    w.position = segment * p.segment_len + tile * TILE_Q;
    w.slot = (int64_t(batch_head) * call_segments + segment - call_segment) * tiles + tile;
    w.kv_perm = p.kv_perm + batch_head * p.kv_perm_head_stride + keys_before(p.first_segment, segment, p.segment_len);
}

// Window and prefix (Algorithm 4), or the window alone (Algorithm 2). `decode` is false for tiles without ranked rows.
template <bool PREFIX>
struct SegmentSchedule : Schedule {
    using Params = S2oParams;
    static constexpr Output OUTPUT = PREFIX ? Output::NORMALISED : Output::STATEFUL;
    static constexpr bool GATHERS_KEYS = PREFIX, MAY_STOP = PREFIX;

    __device__ static int num_items(const Params& p) {
        const int units = p.units.units != nullptr ? *p.units.count : p.num_segments * p.attn.batch * p.attn.num_heads;
        return units * (p.segment_len / TILE_Q);
    }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        int segment, tile;
        decode_segments(p, item, w, segment, tile);
        w.q_start = w.position - (p.attn.k_len - p.attn.q_len);
        w.key_tile = w.position / TILE_K;
        w.gather_from = tile + 1;
        w.steps = w.gather_from + (PREFIX ? segment * (p.segment_len / TILE_K) : 0);
        return w.q_start + TILE_Q > 0 && max(w.q_start, 0) < w.row_end;
    }
};

using SinglePassSchedule = SegmentSchedule<true>;
using Pass1Schedule = SegmentSchedule<false>;

// The prefix alone, for query tiles in q_perm order (Algorithm 3).
struct Pass2Schedule : Schedule {
    using Params = S2oParams;
    static constexpr Output OUTPUT = Output::RESUMED;
    static constexpr bool GATHERS_KEYS = true, PERMUTES_QUERIES = true, MAY_STOP = true;

    __device__ static int num_items(const Params& p) { return SinglePassSchedule::num_items(p); }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        int segment, tile;
        decode_segments(p, item, w, segment, tile);
        const int offset = p.attn.k_len - p.attn.q_len;
        w.q_start = max(0, segment * p.segment_len - offset) + tile * TILE_Q;
        w.row_end = min(p.ranked_rows, (segment + 1) * p.segment_len - offset);
        w.gather_from = 0;
        w.steps = segment * (p.segment_len / TILE_K);
        return w.steps > 0 && w.q_start < w.row_end;
    }
};

}  // namespace s2o
