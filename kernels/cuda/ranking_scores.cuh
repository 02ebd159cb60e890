// Scores of the keys before each segment: coefficients (rows) times [K | K*K] (columns) on the tensor cores, coded in
// 16 bits. Rows are the (segment, head) pairs that share a KV head, so each key is read once for many rows.
//
// A warp keeps the coefficients of its 16 rows in registers. The contraction index and the order of keys inside a tile
// are free, and chosen so that
//  - a lane's 16-byte load (8 consecutive dimensions) is its share of two m16n8k16 products, for both operands;
//  - a lane ends with 8 consecutive keys of a row, one 16-byte store.
//
// Codes are linear between the least and the greatest of the SCORE_BLOCK scores of a row's tile, so their resolution is
// never worse than the row's range / 49000, whatever the scores' size or offset.
#pragma once
#include <cstdint>

#include "ranking_element.cuh"
#include "ranking_params.cuh"

namespace s2o {

constexpr int SCORE_WARPS = 4;
constexpr int SCORE_THREADS = SCORE_WARPS * 32;
constexpr int SCORE_ROWS = SCORE_WARPS * 16;  // of a CTA
constexpr int SCORE_TILES = 32;               // key tiles of a CTA
constexpr int SCORE_STAGES = 3;

template <int D>
constexpr int score_shared_bytes() {
    return SCORE_STAGES * SCORE_BLOCK * D * 2;
}

// Keys of the tile that lane group `n` (0..7) feeds to product group i: thread t of a quad then owns 8t..8t+7 of each 32.
__device__ __forceinline__ int key_of_column(int i, int n) { return 32 * (i / 4) + 8 * (n / 2) + 2 * (i % 4) + n % 2; }

// One row's 16 scores of this lane, whose quad holds the whole row. Whole warps call it, for rows to be stored or not.
__device__ __forceinline__ void store_row_codes(const float (&x)[16], bool stored, uint16_t* codes, float* range, int lane) {
    float low = x[0], high = x[0], sum = x[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
        sum += x[i];
    }
#pragma unroll
    for (int s = 1; s < 4; s *= 2) {
        low = fminf(low, __shfl_xor_sync(~0u, low, s));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, s));
        sum += __shfl_xor_sync(~0u, sum, s);
    }
    // A sum of finite scores may overflow; then the slow way finds nothing, at no harm.
    const bool all_finite = fabsf(sum) < INFINITY;
    if (!all_finite) {
        low = INFINITY;
        high = -INFINITY;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (fabsf(x[i]) < INFINITY) {
                low = fminf(low, x[i]);
                high = fmaxf(high, x[i]);
            }
        }
    }
    if (__any_sync(~0u, !all_finite)) {
#pragma unroll
        for (int s = 1; s < 4; s *= 2) {
            low = fminf(low, __shfl_xor_sync(~0u, low, s));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, s));
        }
    }
    const float span = high - low;
    const bool spread = span > 1e-30f && span < INFINITY;
    const float per_unit = spread ? SCORE_CODE_SPAN / span : 0.f;
    uint32_t bits[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        bits[i] = __float_as_uint(fmaf(x[i] - low, per_unit, SCORE_CODE_START));
        if (!all_finite && !(fabsf(x[i]) < INFINITY)) bits[i] = SCORE_NOT_FINITE << 8;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words[w] = __byte_perm(bits[8 * half + 2 * w], bits[8 * half + 2 * w + 1], 0x6521);
        }
        if (stored) *reinterpret_cast<uint4*>(codes + 32 * half + 8 * (lane % 4)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (stored && lane % 4 == 0) {
        const float factor = spread ? span / SCORE_CODE_SPAN : 0.f;
        // A negative factor announces codes that are SCORE_NOT_FINITE.
        *reinterpret_cast<float2*>(range) =
            make_float2(all_finite ? factor : -factor, high >= low ? fmaf(-SCORE_CODE_START, factor, low) : NAN);
    }
}

// Grid (ceil(longest prefix / (SCORE_TILES * SCORE_BLOCK)), ceil(num_segments * group / SCORE_ROWS), batch * num_kv_heads),
// SCORE_THREADS threads, score_shared_bytes<D>() dynamic shared memory (opt in above 48 KiB).
template <typename T, int D, bool SECOND>
__device__ void key_scores(const RankingParams& p) {
    constexpr int CHUNKS = D / 8;      // of 16 bytes in a key
    constexpr int LOADS = D / 32;      // 16-byte loads of a lane per key or row, two products each
    constexpr int TILE_BYTES = SCORE_BLOCK * D * 2;
    extern __shared__ __align__(128) unsigned char shared[];
    const int group = p.num_heads / p.num_kv_heads, rows = p.num_segments * group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int cta_row = blockIdx.y * SCORE_ROWS, warp_row = cta_row + warp * 16;
    auto prefix_of = [&](int row) { return (p.first_segment + min(row, rows - 1) / group) * p.segment_len; };
    const int first_key = blockIdx.x * (SCORE_TILES * SCORE_BLOCK);
    const int tiles = min(SCORE_TILES, (prefix_of(cta_row + SCORE_ROWS - 1) - first_key) / SCORE_BLOCK);
    if (tiles <= 0) return;
    const int b = blockIdx.z / p.num_kv_heads, kv_head = blockIdx.z % p.num_kv_heads;

    const char* k = reinterpret_cast<const char*>(static_cast<const T*>(p.k) + b * p.k_batch_stride + kv_head * p.k_head_stride);
    // Odd keys have the halves of each 128-byte line exchanged: two keys' 64-byte pieces then lie in different banks.
    auto place = [](int key, int chunk) { return key * (D * 2) + (chunk ^ ((key & 1) << 2)) * 16; };
    auto load_tile = [&](int tile) {
        if (tile < tiles) {
            const uint32_t stage = uint32_t(__cvta_generic_to_shared(shared)) + tile % SCORE_STAGES * TILE_BYTES;
#pragma unroll
            for (int i = 0; i < SCORE_BLOCK * CHUNKS / SCORE_THREADS; ++i) {
                const int piece = threadIdx.x + i * SCORE_THREADS, key = piece / CHUNKS, chunk = piece % CHUNKS;
                const char* source = k + (first_key + tile * SCORE_BLOCK + key) * (p.k_seq_stride * 2) + chunk * 16;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(stage + place(key, chunk)), "l"(source));
            }
        }
        asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (int i = 0; i < SCORE_STAGES - 1; ++i) load_tile(i);

    // a[part][product]: part 0 and 1 are the mean's high and low half, part 2 the variance.
    constexpr int PARTS = SECOND ? 3 : 2;
    uint32_t a[PARTS][2 * LOADS][4];
    const int row0 = warp_row + g, row1 = row0 + 8;
    const int64_t head_rows = int64_t(blockIdx.z) * rows;
    auto coefficient_row = [&](int row) {
        return static_cast<const uint16_t*>(p.coefficients) + (head_rows + min(row, rows - 1)) * (3 * D) + t * 8;
    };
    const uint16_t *c0 = coefficient_row(row0), *c1 = coefficient_row(row1);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const uint4 x = *reinterpret_cast<const uint4*>(c0 + part * D + j * 32);
            const uint4 y = *reinterpret_cast<const uint4*>(c1 + part * D + j * 32);
            const uint32_t even[4] = {x.x, y.x, x.y, y.y}, odd[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[part][2 * j][i] = even[i];
                a[part][2 * j + 1][i] = odd[i];
            }
        }
    }
    const int prefix0 = row0 < rows ? prefix_of(row0) : 0, prefix1 = row1 < rows ? prefix_of(row1) : 0;
    const int warp_prefix = warp_row < rows ? prefix_of(warp_row + 15) : 0;
    auto score_row = [&](int row) {
        const int clamped = min(row, rows - 1), head = b * p.num_heads + kv_head * group + clamped % group;
        return head * p.kv_perm_head_stride + prefix_row(p, p.first_segment + clamped / group);
    };
    const int64_t out0 = score_row(row0), out1 = score_row(row1);

    for (int tile = 0; tile < tiles; ++tile) {
        asm volatile("cp.async.wait_group %0;" ::"n"(SCORE_STAGES - 2));
        __syncthreads();
        load_tile(tile + SCORE_STAGES - 1);
        const int key = first_key + tile * SCORE_BLOCK;
        if (key >= warp_prefix) continue;
        const unsigned char* stage = shared + tile % SCORE_STAGES * TILE_BYTES;
        float x0[16], x1[16];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {  // of product groups, which give four independent sums
            float linear[2][4] = {}, second[2][4] = {};
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = key_of_column(2 * pair + i, g);
                    const uint4 w = *reinterpret_cast<const uint4*>(stage + place(row, 4 * j + t));
#pragma unroll
                    for (int part = 0; part < 2; ++part) {
                        Packed<T>::mma(linear[i], a[part][2 * j], w.x, w.y);
                        Packed<T>::mma(linear[i], a[part][2 * j + 1], w.z, w.w);
                    }
                    if constexpr (SECOND) {
                        using Square = Packed<__nv_bfloat16>;
                        Square::mma(second[i], a[2][2 * j], Packed<T>::squares_bf16(w.x), Packed<T>::squares_bf16(w.y));
                        Square::mma(second[i], a[2][2 * j + 1], Packed<T>::squares_bf16(w.z), Packed<T>::squares_bf16(w.w));
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 2 * (2 * pair + i);
                x0[at] = linear[i][0] + second[i][0];
                x0[at + 1] = linear[i][1] + second[i][1];
                x1[at] = linear[i][2] + second[i][2];
                x1[at + 1] = linear[i][3] + second[i][3];
            }
        }
        auto store = [&](const float(&x)[16], int64_t out, int prefix) {
            const int64_t at = out + key;
            store_row_codes(x, key < prefix, p.scores + at, p.score_ranges + at / SCORE_BLOCK * 2, lane);
        };
        store(x0, out0, prefix0);
        store(x1, out1, prefix1);
    }
}

}  // namespace s2o
