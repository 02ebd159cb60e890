// Column and diagonal sums of the last queries' attention (MInference's vertical and slash scores): by key, and by the
// distance from query back to key. Attention is computed twice and never stored: `last_query_states` finds the softmax
// state of every query for each chunk of keys; `last_query_scores` joins the states, computes the probabilities again
// and sums them.
//
// A tile is 128 rows (all queries) by 64 keys. A warp keeps 16 rows in registers; keys go through a ring of 3 tiles.
// No sum depends on the order in which blocks run.
#include <cstddef>
#include <cstdint>

#include "launch.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "params.cuh"

namespace s2o::last_query {

constexpr int ROWS = 128;  // queries, at most
constexpr int KEYS = 64;   // of a tile
constexpr int WARPS = ROWS / 16;
constexpr int THREADS = WARPS * 32;
constexpr int STAGES = 3;
constexpr int QUARTERS = THREADS / KEYS;  // of the rows, summed separately
// Row pitch of the probabilities: the pairs that a half warp stores (4 rows of 8 entries) fall into different banks.
constexpr int PITCH = KEYS + 8;

struct LastQueryParams {
    const void* q;       // (batch, rows, num_heads, head_dim): the last queries
    const void* k;       // (batch, k_len, num_kv_heads, head_dim)
    RowState* states;    // (batch * num_heads, state_chunks, ROWS), of scaled scores in units of log 2
    float* by_key;       // (batch * num_heads, k_len)
    float* by_distance;  // as by_key; or null
    Strides q_strides;
    Strides k_strides;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t rows;             // at most ROWS
    int32_t k_len;
    int32_t tiles_per_chunk;  // tiles of KEYS keys, or blocks of KEYS distances, per thread block
    int32_t state_chunks;     // thread blocks that share the keys of a head
    float softmax_scale;
};
static_assert(sizeof(LastQueryParams) == 120 && offsetof(LastQueryParams, q_strides) == 40 &&
                  offsetof(LastQueryParams, num_heads) == 88,
              "mirrored on the host");

template <int D>
struct SharedLayout {
    static constexpr int ROW_BYTES = D * 2;
    static constexpr int TILE_BYTES = KEYS * ROW_BYTES;
    static constexpr int PROBS = STAGES * TILE_BYTES;  // offset; the queries lie here first
    static constexpr int PROBS_BYTES = ROWS * PITCH * 4;
    static constexpr int PARTS = PROBS + PROBS_BYTES;     // [key or distance][quarter of the rows][KEYS] of f32
    static constexpr int STATES = PARTS + 2 * QUARTERS * KEYS * 4;  // maximum and factor of each row
    static constexpr int BYTES = STATES + ROWS * 8;
    static_assert(ROWS * ROW_BYTES <= PROBS_BYTES && BYTES <= 99 * 1024);
};

// The scaled scores of a warp's 16 rows for a tile of keys, used by both passes.
template <typename T, int D>
class KeyTiles {
    using Layout = SharedLayout<D>;
    static constexpr int CHUNKS = D / 8;                     // of 16 bytes in a row
    static constexpr int ROWS_APART = THREADS / CHUNKS;  // CHUNKS threads copy a row

    const char* keys;
    int64_t key_bytes;
    uint32_t ring;
    uint32_t queries[D / 16][4];
    int k_len, first_position;  // of the warp's first row
    float scale_log2;

public:
    __device__ __forceinline__ KeyTiles(const LastQueryParams& p, unsigned char* shared, int head) {
        const int b = head / p.num_heads, h = head % p.num_heads, kv_head = h / (p.num_heads / p.num_kv_heads);
        const char* q =
            static_cast<const char*>(p.q) + 2 * (b * p.q_strides.batch + h * p.q_strides.head);
        keys = static_cast<const char*>(p.k) + 2 * (b * p.k_strides.batch + kv_head * p.k_strides.head);
        key_bytes = p.k_strides.seq * 2;
        ring = smem_address(shared);
        k_len = p.k_len;
        first_position = p.k_len - p.rows + threadIdx.x / 32 * 16;
        scale_log2 = p.softmax_scale * LOG2_E;
        const int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_APART; ++i) {
            const int row = line + i * ROWS_APART;
            const uint32_t target = ring + Layout::PROBS + row * Layout::ROW_BYTES + ((chunk ^ (row & 7)) << 4);
            const bool exists = row < p.rows;
            cp_async_16(target, q + (exists ? row : 0) * p.q_strides.seq * 2 + chunk * 16, exists);
        }
        cp_async_commit();
    }

    // Loads a tile into a slot of the ring. Commits a group of copies even if the tile does not exist.
    __device__ __forceinline__ void load(int tile, int slot) {
        if (tile >= 0 && tile * KEYS < k_len) {
            const int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
            for (int i = 0; i < KEYS / ROWS_APART; ++i) {
                const int row = line + i * ROWS_APART, key = tile * KEYS + row;
                const uint32_t target =
                    ring + slot * Layout::TILE_BYTES + row * Layout::ROW_BYTES + ((chunk ^ (row & 7)) << 4);
                const bool exists = key < k_len;
                cp_async_16(target, keys + (exists ? key : 0) * key_bytes + chunk * 16, exists);
            }
        }
        cp_async_commit();
    }

    // Needs a barrier after the copy of the queries.
    __device__ __forceinline__ void keep_queries() {
        const uint32_t address = ring + Layout::PROBS + threadIdx.x / 32 * 16 * Layout::ROW_BYTES +
                                 rows_first<Layout::ROW_BYTES>(threadIdx.x % 32);
#pragma unroll
        for (int d = 0; d < D / 16; ++d) ldmatrix(queries[d], column_step(address, d));
    }

    // Scores times log2(e), -inf for keys that a row does not see, in the layout of online_softmax.cuh.
    __device__ __forceinline__ void scores(float (&s)[KEYS / 2], int tile, int slot) const {
        const int lane = threadIdx.x % 32;
        const uint32_t k = ring + slot * Layout::TILE_BYTES + columns_first<Layout::ROW_BYTES>(lane);
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) s[i] = 0.f;
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                uint32_t b[4];
                ldmatrix(b, column_step(k, d) + n * 16 * Layout::ROW_BYTES);
                mma<T>(s + 8 * n, queries[d], b[0], b[1]);
                mma<T>(s + 8 * n + 4, queries[d], b[2], b[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) s[i] *= scale_log2;
        // The last key that each row sees, counted from the tile's first.
        const int last = first_position - tile * KEYS;
        if (last < KEYS - 1) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int row = 8 * (i >> 1 & 1) + lane / 4, key = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
                if (key > last + row) s[i] = -INFINITY;
            }
        }
    }
};

// The maximum of no terms is -inf, which cannot be subtracted.
__device__ __forceinline__ float finite_reference(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// Grid (batch * num_heads, state_chunks): heads that share keys run at the same time.
template <typename T, int D>
__device__ __forceinline__ void find_states(const LastQueryParams& p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = (p.k_len + KEYS - 1) / KEYS;
    const int first = blockIdx.y * p.tiles_per_chunk, end = min(first + p.tiles_per_chunk, tiles);
    KeyTiles<T, D> rows(p, shared, head);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) rows.load(first + i, i);
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    rows.keep_queries();
    // Over this thread's keys; joined over the quad at the end.
    float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    for (int tile = first, slot = 0; tile < end; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        rows.load(tile + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        if (warp * 16 < p.rows) {
            float s[KEYS / 2];
            rows.scores(s, tile, slot);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float of_tile = maximum[r];
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 4) of_tile = fmaxf(of_tile, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
                const float reference = finite_reference(of_tile);
                sum[r] *= exp2_approx(maximum[r] - reference);
                maximum[r] = of_tile;
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 4) {
                    sum[r] += exp2_approx(s[i + 2 * r] - reference) + exp2_approx(s[i + 2 * r + 1] - reference);
                }
            }
        }
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float of_row = quad_max(maximum[r]);
        const float of_quad = quad_sum(sum[r] * exp2_approx(maximum[r] - finite_reference(of_row)));
        if (lane % 4 == 0) {
            const int64_t chunk = int64_t(head) * p.state_chunks + blockIdx.y;
            p.states[chunk * ROWS + warp * 16 + 8 * r + lane / 4] = {of_row, of_quad};
        }
    }
}

// Distances go in blocks of KEYS, numbered as tiles: block m holds the distances between the first query and the
// keys m * KEYS - o for o in 0..KEYS, to which tiles m - 1, m and m + 1 contribute. Blocks -1 to `tiles` hold all
// distances. A chunk is a range of blocks and the tiles of the same numbers; it also computes the tile on either side.
//
// Grid (batch * num_heads, ceil((tiles + 2) / tiles_per_chunk)).
template <typename T, int D>
__device__ __forceinline__ void add_scores(const LastQueryParams& p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using Layout = SharedLayout<D>;
    float* probs = reinterpret_cast<float*>(shared + Layout::PROBS);
    float* parts = reinterpret_cast<float*>(shared + Layout::PARTS);
    float2* states = reinterpret_cast<float2*>(shared + Layout::STATES);
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = (p.k_len + KEYS - 1) / KEYS;
    const int first_block = int(blockIdx.y) * p.tiles_per_chunk - 1;
    const int end_block = min(first_block + p.tiles_per_chunk, tiles + 1);
    const int beside = p.by_distance != nullptr;
    const int first = first_block - beside, end = end_block + beside;
    KeyTiles<T, D> rows(p, shared, head);
    auto load = [&](int tile, int slot) { rows.load(tile < end ? tile : -1, slot); };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load(first + i, i);

    if (threadIdx.x < ROWS) {
        const RowState* state = p.states + int64_t(head) * p.state_chunks * ROWS + threadIdx.x;
        float maximum = -INFINITY, sum = 0.f;
#pragma unroll 8
        for (int i = 0; i < p.state_chunks; ++i) maximum = fmaxf(maximum, state[i * ROWS].row_max);
        const float reference = finite_reference(maximum);
#pragma unroll 8
        for (int i = 0; i < p.state_chunks; ++i) {
            const RowState of_chunk = state[i * ROWS];
            sum += of_chunk.row_sum * exp2_approx(of_chunk.row_max - reference);
        }
        states[threadIdx.x] = make_float2(reference, 1.f / (sum * float(p.rows)));
    }
    cp_async_wait<STAGES - 1>();
    __syncthreads();
    rows.keep_queries();
    float reference[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 state = states[warp * 16 + 8 * r + lane / 4];
        reference[r] = state.x;
        factor[r] = state.y;
    }

    // This thread sums one key and one distance, which wraps around the tile's edge, over a quarter of the rows.
    const int quarter = threadIdx.x / KEYS, place = threadIdx.x % KEYS;
    const int first_row = quarter * (ROWS / QUARTERS);
    const int end_row = min(first_row + ROWS / QUARTERS, p.rows);
    // Rows before `turn` contribute to the block after the block to which the other rows contribute.
    const int turn = place + (quarter < QUARTERS / 2 ? 0 : KEYS);
    float carried = 0.f, previous = 0.f;
    const int64_t out = int64_t(head) * p.k_len;
    // Stores the sums of the previous tile, one thread per key and one per distance.
    auto publish = [&](int tile) {
        const bool distance = threadIdx.x >= KEYS;
        if (threadIdx.x >= 2 * KEYS || (distance && !beside)) return;
        const int block = tile - distance;
        if (block < first_block || block >= end_block) return;
        const int at = distance ? p.k_len - p.rows - block * KEYS + place : block * KEYS + place;
        if (at < 0 || at >= p.k_len) return;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) sum += parts[(distance * QUARTERS + i) * KEYS + place];
        (distance ? p.by_distance : p.by_key)[out + at] = sum;
    };

    for (int tile = first, slot = 0; tile < end; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(tile + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        if (tile > first) publish(tile - 1);
        const bool exists = tile >= 0 && tile < tiles;
        if (exists && warp * 16 < p.rows) {
            float s[KEYS / 2];
            rows.scores(s, tile, slot);
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 2) {
                const int r = i >> 1 & 1;
                float* pair = probs + (warp * 16 + 8 * r + lane / 4) * PITCH + 8 * (i >> 2) + 2 * (lane % 4);
                *reinterpret_cast<float2*>(pair) = make_float2(exp2_approx(s[i] - reference[r]) * factor[r],
                                                               exp2_approx(s[i + 1] - reference[r]) * factor[r]);
            }
        }
        __syncthreads();
        float of_key = 0.f, before = 0.f, after = 0.f;
        if (exists) {
#pragma unroll 8
            for (int row = first_row; row < end_row; ++row) {
                of_key += probs[row * PITCH + place];
                if (beside) {
                    const float x = probs[row * PITCH + ((row - place) & (KEYS - 1))];
                    before += row < turn ? x : 0.f;
                    after += row < turn ? 0.f : x;
                }
            }
        }
        parts[threadIdx.x] = of_key;
        // The first two quarters complete the block with this tile's number, the last two the block before it.
        const float complete = carried + after;
        carried = before;
        parts[THREADS + threadIdx.x] = quarter < QUARTERS / 2 ? previous : complete;
        previous = complete;
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    __syncthreads();
    publish(end - 1);
}

}  // namespace s2o::last_query

#define S2O_LAST_QUERY_KERNEL(name, phase, T, D)                                                                   \
    extern "C" {                                                                                                   \
    __constant__ s2o::LaunchInfo name##_launch = {                                                                 \
        s2o::last_query::THREADS, s2o::last_query::SharedLayout<D>::BYTES, 0, 0};                                  \
    __global__ void __launch_bounds__(s2o::last_query::THREADS, 2)                                                 \
        name(const __grid_constant__ s2o::last_query::LastQueryParams p) {                                         \
        s2o::last_query::phase<T, D>(p);                                                                           \
    }                                                                                                              \
    }

#define S2O_LAST_QUERY_KERNELS(suffix, T, D)                                    \
    S2O_LAST_QUERY_KERNEL(s2o_last_query_states_##suffix, find_states, T, D)    \
    S2O_LAST_QUERY_KERNEL(s2o_last_query_scores_##suffix, add_scores, T, D)

S2O_LAST_QUERY_KERNELS(bf16_64, __nv_bfloat16, 64)
S2O_LAST_QUERY_KERNELS(bf16_128, __nv_bfloat16, 128)
S2O_LAST_QUERY_KERNELS(f16_64, __half, 64)
S2O_LAST_QUERY_KERNELS(f16_128, __half, 128)
