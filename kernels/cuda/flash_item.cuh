// The work items of `flash`: tiles of queries of one head, and the keys that they see.
#pragma once
#include <cstdint>

#include "flash_params.cuh"

namespace s2o::flash {

constexpr int KEYS = 64;  // of a key tile

struct Item {
    int batch, head, kv_head;
    int part;            // of the output's columns
    int q_base, k_base;  // first rows of the sequence; k_base is 0 with pages
    int q_len, k_len;    // of the sequence
    int q_start;         // first query of the tile, counted in the sequence
    int position;        // of that query
    int key_tile, end_tile;  // key tiles to visit

    // Positions of range r of the sequence: [x, y).
    __device__ __forceinline__ int2 range(const FlashParams& p, int r) const {
        return reinterpret_cast<const int2*>(p.ranges)[int64_t(batch) * p.num_ranges + r];
    }
};

// Beginning and length of a sequence in rows, cut to the rows that exist and to the longest length.
__device__ inline int2 sequence(const int32_t* starts, int b, int rows, int longest) {
    const int first = min(max(starts[b], 0), rows);
    return make_int2(first, min(min(max(starts[b + 1], first), rows) - first, longest));
}

// Whether the output has the sequence already (FlashParams::done). Then the counter jumps to the next sequence, so that
// the items of a long one are not taken one by one. Items from gridDim.x on come from the counter.
__device__ inline bool skips_sequence(const FlashParams& p, int b, int items_of_sequence) {
    if (p.done == nullptr) return false;
    const int4 rows = reinterpret_cast<const int4*>(p.done)[b];
    const bool done = p.q_starts[b] == rows.x && p.q_starts[b + 1] == rows.y && p.k_starts[b] == rows.z &&
                      p.k_starts[b + 1] == rows.w;
    if (done) atomicMax(p.next_item, (b + 1) * items_of_sequence - int(gridDim.x));
    return done;
}

// The rows from q_start on, `rows` at most; false if the sequence has none.
__device__ inline bool set_queries(const FlashParams& p, Item& w, int rows) {
    w.q_base = w.k_base = 0;
    w.q_len = p.q_len;
    w.k_len = p.k_len;
    if (p.q_starts != nullptr) {
        const int2 q = sequence(p.q_starts, w.batch, p.q_rows, p.q_len);
        w.q_base = q.x;
        w.q_len = q.y;
        // The lengths of paged keys are not places: they are cut to the pages of a sequence.
        const int k_rows = p.pages != nullptr ? INT32_MAX : p.k_rows;
        const int2 k = sequence(p.k_starts, w.batch, k_rows, p.k_len);
        w.k_len = k.y;
        w.k_base = p.pages != nullptr ? 0 : k.x;
    }
    if (w.q_start >= w.q_len) return false;
    w.position = w.q_start + w.k_len - w.q_len;
    int first = w.position, last = w.position + min(rows, w.q_len - w.q_start) - 1;
    int begin = max(first - p.left, 0), end = min(last + p.right + 1, w.k_len);
    for (int r = 0; r < p.num_ranges; ++r) {
        const int2 range = w.range(p, r);
        if (range.x > last || range.y <= first || range.x >= range.y) continue;
        begin = min(begin, max(range.x, 0));
        end = max(end, min(range.y, w.k_len));
    }
    w.key_tile = begin / KEYS;
    w.end_tile = max((end + KEYS - 1) / KEYS, w.key_tile);
    return true;
}

// Sequences one after another; in a sequence, sections of heads; in a section, the last queries first, which see most
// keys if the call is causal.
__device__ inline bool decode(const FlashParams& p, int item, int rows, int parts, Item& w) {
    w.part = item % parts;
    item /= parts;
    const int tiles = (p.q_len + rows - 1) / rows;
    w.batch = item / (p.num_heads * tiles);
    item -= w.batch * p.num_heads * tiles;
    const int first_head = item / (p.heads_per_section * tiles) * p.heads_per_section;
    item -= first_head * tiles;
    const int heads = min(p.heads_per_section, p.num_heads - first_head);
    w.head = first_head + item % heads;
    w.kv_head = w.head / (p.num_heads / p.num_kv_heads);
    w.q_start = (tiles - 1 - item / heads) * rows;
    return set_queries(p, w, rows);
}

}  // namespace s2o::flash
