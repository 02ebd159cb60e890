// Attention of one query per sequence: every key and value is read once, so the kernel is as fast as memory. The query
// heads of a KV head are the rows of one matrix product, and a block takes one part of the keys. If there is one part,
// its results are the output; otherwise `merge` joins them.
//
// The warps of a block share no data until they end. Each warp has its own keys, 16 of every 64, its own ring of
// loads, and its own softmax; so no barrier delays a load.
//
// Grid: x: (batch, KV head, 16 of its query heads), y: part. Neighbouring blocks read the same tokens, whose heads are
// neighbours in memory.
#pragma once
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

__device__ __forceinline__ const SplitParams& split_params(const SplitParams& p) { return p; }

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

// The queries as the first operand of products; rows and columns that do not exist are zeros. They are few and read once, so they
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
        const bool exists = lane / 4 + 8 * later < item.rows && column < attn.head_dim;
        q[i / 4][i % 4] = exists ? *reinterpret_cast<const uint32_t*>(row + 2 * (8 * later * s.head + column)) : 0;
    }
}

// A row of a warp's result, which lies in its memory when its ring is empty; padded, so that the rows that a store writes
// begin in different banks.
template <int HEAD_DIM>
constexpr int RESULT_ROW = HEAD_DIM + 8;

// Joins the results of the warps, each in `warp_bytes` of `raw`, in a fixed order, and writes the output or the part's
// result.
template <typename T, int HEAD_DIM>
__device__ __forceinline__ void store_joined(const SplitParams& p, const DecodeItem& item,
                                             const RowState (&states)[DECODE_WARPS][DECODE_HEADS], const char* raw,
                                             int warp_bytes) {
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
            const float* result = reinterpret_cast<const float*>(raw + w * warp_bytes) + row * RESULT_ROW<HEAD_DIM>;
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
        } else if (column < attn.head_dim) {
            T* out = static_cast<T*>(attn.out) + item.batch * attn.out_strides.batch + head * attn.out_strides.head;
            *reinterpret_cast<uint32_t*>(out + column) = pack<T>(sum.x / row_sum, sum.y / row_sum);
            if (attn.lse != nullptr && column == 0) {
                attn.lse[batch_head] = row_max * attn.softmax_scale + logf(row_sum);
            }
        }
    }
}

// `Ring` loads the keys and values of a warp, WARP_KEYS in a step, from the memory that `Params` names. Its `next` gives
// the address of a step's keys in 16 bits, which its values follow, as this lane's matrix loads expect them.
template <typename T, int HEAD_DIM, typename Ring, typename Params>
__device__ __forceinline__ void decode(const Params& params) {
    constexpr int ROW = HEAD_DIM * 2;  // bytes
    static_assert(DECODE_HEADS * RESULT_ROW<HEAD_DIM> * 4 <= Ring::BYTES);
    const SplitParams& p = split_params(params);
    extern __shared__ __align__(1024) char raw[];
    __shared__ RowState states[DECODE_WARPS][DECODE_HEADS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const DecodeItem item(p);
    char* const own = raw + warp * Ring::BYTES;
    int key = item.first_key + warp * WARP_KEYS;
    Ring ring(params, item, key, smem_address(own), lane);
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
        const uint32_t k = keys + columns_first<ROW>(lane);
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
        const uint32_t v = keys + WARP_KEYS * ROW + rows_first<ROW>(lane);
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
        float* result = reinterpret_cast<float*>(own) + row * RESULT_ROW<HEAD_DIM> + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) {
            *reinterpret_cast<float2*>(result + 8 * i) = make_float2(acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]);
        }
        if (lane % 4 == 0) states[warp][row] = {softmax.row_max[h], softmax.row_sum[h]};
    }
    __syncthreads();
    store_joined<T, HEAD_DIM>(p, item, states, raw, Ring::BYTES);
}

}  // namespace s2o
