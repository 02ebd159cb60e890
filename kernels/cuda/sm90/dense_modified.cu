// Dense attention with softcap, ALiBi, sequences or pages on sm_90a, causal or not.
#include "../flash_item.cuh"
#include "../modified_schedule.cuh"
#include "engine.cuh"
#include "instantiate.cuh"

namespace s2o {

// Sequences one after another, each in the order of DenseSchedule. The rows of all are one batch of the tensors.
struct SequencesSchedule : ModifiedSchedule {
    static constexpr bool SEQUENCES = true, ITEMS_MAY_BE_EMPTY = true;
    // TMA loads zeros for the columns that the tensors do not have.
    static constexpr bool NARROW_HEADS = true;

    // Tiles are cut at positions: a sequence whose first query is not at such a cut has one more.
    __device__ __forceinline__ static int most_tiles(const Params& p) { return (p.q_len + TILE_Q - 1) / TILE_Q + 1; }
    // The tile of a position, which is negative for queries before the first key.
    __device__ __forceinline__ static int tile_of(int position) {
        return (position - (position < 0 ? TILE_Q - 1 : 0)) / TILE_Q;
    }
    __device__ static int num_items(const Params& p) {
        if (p.q_starts == nullptr) return ModifiedSchedule::num_items(p);
        return p.batch * p.num_heads * most_tiles(p);
    }

    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        const AttnParams attn = attn_of(p);
        if (p.q_starts == nullptr) {
            decode_whole(p, attn, item, w);
            w.sequence = {0, 0, p.k_len};
            return true;
        }
        const int sequence_items = p.num_heads * most_tiles(p);
        const int sequence = item / sequence_items;
        if (flash::skips_sequence(p, sequence, sequence_items)) return false;
        const int in_sequence = item - sequence * sequence_items;
        const int first_head = in_sequence / (p.heads_per_section * most_tiles(p)) * p.heads_per_section;
        const int in_section = in_sequence - first_head * most_tiles(p);
        const int heads = min(p.heads_per_section, p.num_heads - first_head);
        const int row = in_section / heads;
        w.set_head(attn, first_head + in_section - row * heads);

        const int2 q = flash::sequence(p.q_starts, sequence, p.q_rows, p.q_len);
        const bool paged = p.pages != nullptr;
        const int2 k = flash::sequence(p.k_starts, sequence, paged ? INT32_MAX : p.k_rows, p.k_len);
        const int offset = attn.causal ? k.y - q.y : 0;
        const int tile = tile_of(offset + q.y - 1) - row;
        if (q.y == 0 || tile < tile_of(offset)) return false;
        w.sequence = {q.x, paged ? sequence * p.pages_per_sequence : k.x, k.y};
        w.q_start = q.x + tile * TILE_Q - offset;
        w.row_end = q.x + q.y;
        w.position = tile * TILE_Q + (attn.causal ? 0 : k.y - q.y);
        w.key_tile = attn.causal ? tile : tile_of(k.y - 1);
        // Queries before the first key, and those of sequences without keys, see none.
        w.steps = w.gather_from = w.key_tile + 1 > 0 ? w.key_tile + 1 : 0;
        return true;
    }
};

struct PagedSchedule : SequencesSchedule {
    static constexpr bool PAGED = true;
};

}  // namespace s2o

S2O_KERNELS(s2o_dense_modified, s2o::SequencesSchedule)
S2O_KERNELS(s2o_dense_paged, s2o::PagedSchedule)
S2O_WIDE_KERNELS(s2o_dense_modified, 192, s2o::SequencesSchedule)
S2O_WIDE_KERNELS(s2o_dense_modified, 256, s2o::SequencesSchedule)
S2O_WIDE_KERNELS(s2o_dense_paged, 192, s2o::PagedSchedule)
S2O_WIDE_KERNELS(s2o_dense_paged, 256, s2o::PagedSchedule)
