// Attention of one query per sequence: every key and value is read once, so the kernel is as fast as memory. The query
// heads of a KV head are the rows of one matrix product, and a block takes one part of the keys. If there is one part,
// its results are the output; otherwise `merge` joins them.
//
// The warps of a block share no data until they end. Each warp has its own keys, 16 of every 64, its own ring of
// loads, and its own softmax; so no barrier delays a load.
//
// Grid: x: (batch, KV head, 16 of its query heads), y: part. Neighbouring blocks read the same tokens, whose heads are
// neighbours in memory.
#include "launch.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "pair.cuh"
#include "params.cuh"

namespace s2o {

constexpr int DECODE_WARPS = 4;
constexpr int DECODE_THREADS = DECODE_WARPS * 32;
constexpr int DECODE_HEADS = 16;                                // query heads of a block: one m16 fragment
constexpr int WARP_KEYS = 16;                                  // of a warp in a step
constexpr int STEP_KEYS = DECODE_WARPS * WARP_KEYS;            // of a block
constexpr int DECODE_BLOCKS_PER_SM = 2;                        // on sm_90
static_assert(TILE_K % STEP_KEYS == 0);

template <int HEAD_DIM>
struct DecodeLayout {
    static constexpr int ROW = HEAD_DIM * 2;                   // bytes
    static constexpr int ROW_CHUNKS = HEAD_DIM / 8;            // of 16 bytes
    static constexpr int ROWS_APART = 32 / ROW_CHUNKS;         // ROW_CHUNKS lanes copy a row
    static constexpr int SIDE_BYTES = WARP_KEYS * ROW;         // keys or values of a step
    static constexpr int STAGE_BYTES = 2 * SIDE_BYTES;
    // 24 KiB for each warp, of which two thirds and more are in flight: 64 KiB and more for each block.
    static constexpr int STAGES = 24 * 1024 / STAGE_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int BYTES = DECODE_WARPS * RING_BYTES;
    // A row of a warp's result, which lies in its ring when the ring is empty; padded, so that the rows that a store
    // writes begin in different banks.
    static constexpr int RESULT_ROW = HEAD_DIM + 8;
    static_assert(DECODE_HEADS * RESULT_ROW * 4 <= RING_BYTES);
    // One block fits in the 99 KiB of the smallest GPUs, with its states; two in the 227 KiB of an H100.
    static_assert(BYTES + 1024 <= 99 * 1024);
};

// What a block computes.
struct DecodeItem {
    int batch, kv_head, first_head, rows;  // `rows` query heads from first_head on
    int first_key, end_key;

    __device__ __forceinline__ explicit DecodeItem(const SplitParams& p) {
        const AttnParams& attn = p.attn;
        const int group = attn.num_heads / attn.num_kv_heads, tiles = (group + DECODE_HEADS - 1) / DECODE_HEADS;
        const int tile = blockIdx.x % tiles, batch_kv_head = blockIdx.x / tiles;
        batch = batch_kv_head / attn.num_kv_heads;
        kv_head = batch_kv_head - batch * attn.num_kv_heads;
        first_head = kv_head * group + tile * DECODE_HEADS;
        rows = min(DECODE_HEADS, group - tile * DECODE_HEADS);
        first_key = blockIdx.y * p.tiles_per_split * TILE_K;
        end_key = min(first_key + p.tiles_per_split * TILE_K, attn.k_len);
    }
};

// The ring of a warp's keys and values. A slot is filled again one step after it was read.
template <int HEAD_DIM>
class DecodeRing {
    using L = DecodeLayout<HEAD_DIM>;
    const char* rows[2];   // keys and values, from this lane's chunk of its first row on
    int64_t row_bytes[2];
    uint32_t ring;         // address of this lane's chunk in the first slot, without the swizzle
    int line, chunk;
    int key, end;          // this lane's first key of the next load
    int fill = 0, read = 0;  // slots, in bytes

public:
    __device__ __forceinline__ DecodeRing(const AttnParams& attn, const DecodeItem& item, int first_key,
                                          uint32_t address, int lane)
        : ring(address), line(lane / L::ROW_CHUNKS), chunk(lane % L::ROW_CHUNKS), key(first_key + line),
          end(item.end_key) {
        const Strides &ks = attn.k_strides, &vs = attn.v_strides;
        rows[0] = static_cast<const char*>(attn.k) + 2 * (item.batch * ks.batch + item.kv_head * ks.head) + chunk * 16;
        rows[1] = static_cast<const char*>(attn.v) + 2 * (item.batch * vs.batch + item.kv_head * vs.head) + chunk * 16;
        row_bytes[0] = ks.seq * 2;
        row_bytes[1] = vs.seq * 2;
        for (int i = 0; i < L::STAGES - 1; ++i) load();
    }
    // Rows past the end are zeros: whatever memory holds there, times a probability of zero, may be NaN.
    __device__ __forceinline__ void load() {
        if (key - line < end) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const char* src = rows[side] + key * row_bytes[side];
                const uint32_t dst = ring + fill + side * L::SIDE_BYTES;
#pragma unroll
                for (int i = 0; i < WARP_KEYS / L::ROWS_APART; ++i) {
                    const int r = line + i * L::ROWS_APART;
                    cp_async_16(dst + r * L::ROW + ((chunk ^ (r & 7)) << 4), src, key + i * L::ROWS_APART < end);
                    src += L::ROWS_APART * row_bytes[side];
                }
            }
        }
        cp_async_commit();  // also without copies: `next` counts the groups
        key += STEP_KEYS;
        fill = fill == L::RING_BYTES - L::STAGE_BYTES ? 0 : fill + L::STAGE_BYTES;
    }
    // The address of the next step's keys, which its values follow.
    __device__ __forceinline__ uint32_t next() {
        cp_async_wait<L::STAGES - 2>();
        __syncwarp();
        load();
        const uint32_t address = ring + read;
        read = read == L::RING_BYTES - L::STAGE_BYTES ? 0 : read + L::STAGE_BYTES;
        return address;
    }
};

// The queries as the first operand of products; rows that do not exist are zeros. They are few and read once, so they
// do not pass through shared memory.
template <int HEAD_DIM>
__device__ __forceinline__ void read_queries(uint32_t (&q)[HEAD_DIM / 16][4], const AttnParams& attn,
                                             const DecodeItem& item, int lane) {
    const Strides& s = attn.q_strides;
    const char* row = static_cast<const char*>(attn.q) + 2 * (item.batch * s.batch + item.first_head * s.head);
    row += 2 * (lane / 4 * s.head + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 4; ++i) {
        const int later = i & 1, column = 16 * (i / 4) + 8 * (i >> 1 & 1);
        const bool exists = lane / 4 + 8 * later < item.rows;
        q[i / 4][i % 4] = exists ? *reinterpret_cast<const uint32_t*>(row + 2 * (8 * later * s.head + column)) : 0;
    }
}

// Joins the results of the warps in a fixed order, and writes the output or the part's result.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void store_joined(const SplitParams& p, const DecodeItem& item,
                                             const RowState (&states)[DECODE_WARPS][DECODE_HEADS], const char* raw) {
    using L = DecodeLayout<HEAD_DIM>;
    const AttnParams& attn = p.attn;
    for (int i = threadIdx.x; i < item.rows * (HEAD_DIM / 2); i += DECODE_THREADS) {
        const int row = i / (HEAD_DIM / 2), column = i % (HEAD_DIM / 2) * 2;
        float row_max = -INFINITY;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; ++w) row_max = fmaxf(row_max, states[w][row].row_max);
        float2 sum = {0.f, 0.f};
        float row_sum = 0.f;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; ++w) {
            const RowState state = states[w][row];
            if (state.row_sum == 0.f) continue;  // the warp had no key; with NaN it has NaN here
            const float factor = exp2_approx((state.row_max - row_max) * (attn.softmax_scale * LOG2_E));
            const float* result = reinterpret_cast<const float*>(raw + w * L::RING_BYTES) + row * L::RESULT_ROW;
            row_sum = fmaf(state.row_sum, factor, row_sum);
            sum.x = fmaf(result[column], factor, sum.x);
            sum.y = fmaf(result[column + 1], factor, sum.y);
        }
        const int head = item.first_head + row;
        const int64_t batch_head = int64_t(item.batch) * attn.num_heads + head;
        if (p.num_splits > 1) {
            const int64_t slot = batch_head * p.num_splits + blockIdx.y;
            *reinterpret_cast<float2*>(p.partial_out + slot * HEAD_DIM + column) = sum;
            if (column == 0) p.partial_state[slot] = {row_max, row_sum};
        } else {
            T* out = static_cast<T*>(attn.out) + item.batch * attn.out_strides.batch + head * attn.out_strides.head;
            *reinterpret_cast<uint32_t*>(out + column) = pack<T>(sum.x / row_sum, sum.y / row_sum);
            if (attn.lse != nullptr && column == 0) {
                attn.lse[batch_head] = row_max * attn.softmax_scale + logf(row_sum);
            }
        }
    }
}

template <typename T, int HEAD_DIM>
__device__ __forceinline__ void decode(const SplitParams& p) {
    using L = DecodeLayout<HEAD_DIM>;
    extern __shared__ __align__(1024) char raw[];
    __shared__ RowState states[DECODE_WARPS][DECODE_HEADS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const DecodeItem item(p);
    char* const own = raw + warp * L::RING_BYTES;
    int key = item.first_key + warp * WARP_KEYS;
    DecodeRing<HEAD_DIM> ring(p.attn, item, key, smem_address(own), lane);
    uint32_t q[HEAD_DIM / 16][4];
    read_queries<HEAD_DIM>(q, p.attn, item, lane);

    const float scale_log2 = p.attn.softmax_scale * LOG2_E;
    OnlineSoftmax softmax;
    float acc[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) acc[i] = 0.f;
    for (; key < item.end_key; key += STEP_KEYS) {
        const uint32_t keys = ring.next();
        float s[WARP_KEYS / 2] = {};
        const uint32_t k = keys + columns_first<L::ROW>(lane);
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; ++d) {
            uint32_t b[4];
            ldmatrix(b, column_step(k, d));
            mma<T>(s, q[d], b[0], b[1]);
            mma<T>(s + 4, q[d], b[2], b[3]);
        }
        if (key + WARP_KEYS > item.end_key) {
#pragma unroll
            for (int i = 0; i < WARP_KEYS / 2; ++i) {
                if (key + 8 * (i >> 2) + 2 * (lane % 4) + (i & 1) >= item.end_key) s[i] = -INFINITY;
            }
        }
        float rescale[2], tile_sum[2], tile_max[2];
        softmax.template update<true, false>(s, scale_log2, rescale, tile_sum, tile_max);
        // Late in a part no maximum rises.
        if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) rescale_rows(acc, rescale);
        uint32_t probs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) probs[i] = pack<T>(s[2 * i], s[2 * i + 1]);
        const uint32_t v = keys + L::SIDE_BYTES + rows_first<L::ROW>(lane);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
            uint32_t b[4];
            ldmatrix_transposed(b, column_step(v, n));
            mma<T>(acc + 8 * n, probs, b[0], b[1]);
            mma<T>(acc + 8 * n + 4, probs, b[2], b[3]);
        }
    }
    // No load is in flight: those past the end copied nothing. Other lanes may still read the last step.
    __syncwarp();
    softmax.finish();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = 8 * h + lane / 4;
        if (row >= item.rows) continue;
        float* result = reinterpret_cast<float*>(own) + row * L::RESULT_ROW + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            *reinterpret_cast<float2*>(result + 8 * i) = make_float2(acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]);
        }
        if (lane % 4 == 0) states[warp][row] = {softmax.row_max[h], softmax.row_sum[h]};
    }
    __syncthreads();
    store_joined<T, HEAD_DIM>(p, item, states, raw);
}

}  // namespace s2o

#define S2O_DECODE(name, T, HEAD_DIM)                                                                        \
    extern "C" {                                                                                             \
    __constant__ s2o::LaunchInfo name##_launch = {s2o::DECODE_THREADS, s2o::DecodeLayout<HEAD_DIM>::BYTES,   \
                                                  s2o::DECODE_BLOCKS_PER_SM, 0};                             \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(s2o::DECODE_THREADS, s2o::DECODE_BLOCKS_PER_SM)             \
        name(const __grid_constant__ s2o::SplitParams p) {                                                   \
        s2o::decode<T, HEAD_DIM>(p);                                                                         \
    }

S2O_DECODE(s2o_decode_bf16_64, __nv_bfloat16, 64)
S2O_DECODE(s2o_decode_bf16_128, __nv_bfloat16, 128)
S2O_DECODE(s2o_decode_f16_64, __half, 64)
S2O_DECODE(s2o_decode_f16_128, __half, 128)
