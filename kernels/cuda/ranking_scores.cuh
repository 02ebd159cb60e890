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

#ifndef S2O_AT_ONCE
#define S2O_AT_ONCE 8
#endif
constexpr int SCORE_WARPS = 4;
constexpr int SCORE_THREADS = SCORE_WARPS * 32;
constexpr int SCORE_ROWS = SCORE_WARPS * 16;  // of a CTA
constexpr int SCORE_STAGES = 3;

template <int D>
constexpr int score_shared_bytes() {
    return SCORE_STAGES * SCORE_BLOCK * D * 2;
}

// Keys of the tile that lane group `n` (0..7) feeds to product group i: thread t of a quad then owns 8t..8t+7 of each 32.
__device__ __forceinline__ int key_of_column(int i, int n) { return 32 * (i / 4) + 8 * (n / 2) + 2 * (i % 4) + n % 2; }

// One row's 16 scores of this lane, whose quad holds the whole row. Whole warps call it, for rows to be stored or not.
__device__ __forceinline__ void store_row_codes(float (&x)[16], bool stored, uint16_t* codes, float* range, int lane) {
    float low, high;
    auto find_extremes = [&] {
        low = x[0], high = x[0];
#pragma unroll
        for (int i = 1; i < 16; ++i) {
            low = fminf(low, x[i]);
            high = fmaxf(high, x[i]);
        }
#pragma unroll
        for (int s = 1; s < 4; s *= 2) {
            low = fminf(low, __shfl_xor_sync(~0u, low, s));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, s));
        }
    };
    find_extremes();
    // The extremes pass NaN over; a sum does not. Should one of finite scores overflow, no harm is done below.
    float sum = x[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) sum += x[i];
    const uint32_t not_finite = __ballot_sync(~0u, !(fabsf(sum) < INFINITY));
    if (not_finite) {
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] = fabsf(x[i]) < INFINITY ? x[i] : NAN;
        find_extremes();
    }
    const float span = high - low;
    const bool spread = span > 1e-30f && span < INFINITY;
    const float per_unit = spread ? __fdividef(SCORE_CODE_SPAN, span) : 0.f;
    // Arithmetic on NaN gives 0x7fffffff, whose bits 8..23 are SCORE_NOT_FINITE.
    uint32_t bits[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) bits[i] = __float_as_uint(fmaf(x[i] - low, per_unit, SCORE_CODE_START));
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
        const float factor = spread ? span * (1.f / SCORE_CODE_SPAN) : 0.f;
        // A negative factor announces codes that are SCORE_NOT_FINITE.
        *reinterpret_cast<float2*>(range) =
            make_float2(not_finite >> lane & 15 ? -factor : factor, fmaf(-SCORE_CODE_START, factor, low));
    }
}

// Grid (at most key tiles of the longest prefix, ceil(num_segments * group / SCORE_ROWS), batch * num_kv_heads): the
// CTAs of a row share the tiles out evenly. SCORE_THREADS threads, score_shared_bytes<D>() dynamic shared memory.
template <typename T, int D, bool SECOND>
__device__ __forceinline__ void key_scores(const RankingParams& p) {
    constexpr int CHUNKS = D / 8;      // of 16 bytes in a key
    constexpr int LOADS = D / 32;      // 16-byte loads of a lane per key or row, two products each
    constexpr int TILE_BYTES = SCORE_BLOCK * D * 2;
    constexpr int PIECES = SCORE_BLOCK * CHUNKS / SCORE_THREADS;  // that a thread copies of a tile
    extern __shared__ __align__(128) unsigned char shared[];
    const int group = p.num_heads / p.num_kv_heads, rows = p.num_segments * group;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Rows further down have longer prefixes: they go around the warps, so that no scheduler gets all the short ones.
    const int cta_row = blockIdx.y * SCORE_ROWS;
    const int warp_row = cta_row + (threadIdx.x / 32 + blockIdx.x + blockIdx.z) % SCORE_WARPS * 16;
    auto prefix_of = [&](int row) { return (p.first_segment + min(row, rows - 1) / group) * p.segment_len; };
    const int longest = (p.first_segment + p.num_segments - 1) * p.segment_len / SCORE_BLOCK;
    const int share = (longest + gridDim.x - 1) / gridDim.x, first_tile = blockIdx.x * share;
    const int tiles = min(share, prefix_of(cta_row + SCORE_ROWS - 1) / SCORE_BLOCK - first_tile);
    if (tiles <= 0) return;
    const int first_key = first_tile * SCORE_BLOCK;
    const int b = blockIdx.z / p.num_kv_heads, kv_head = blockIdx.z % p.num_kv_heads;

    // Odd keys have the halves of each 128-byte line exchanged: two keys' 64-byte pieces then lie in different banks.
    auto place = [](int key, int chunk) { return key * (D * 2) + (chunk ^ ((key & 1) << 2)) * 16; };
    // Consecutive pieces of a thread are an even number of keys apart.
    constexpr int KEYS_APART = SCORE_THREADS / CHUNKS;
    const int key0 = threadIdx.x / CHUNKS, chunk0 = threadIdx.x % CHUNKS;
    const uint32_t target0 = uint32_t(__cvta_generic_to_shared(shared)) + place(key0, chunk0);
    const int64_t key_bytes = p.k_seq_stride * 2;
    const char* source = reinterpret_cast<const char*>(static_cast<const T*>(p.k) + b * p.k_batch_stride + kv_head * p.k_head_stride) +
                         (first_key + key0) * key_bytes + chunk0 * 16;
    auto load_tile = [&](int tile) {
        if (tile < tiles) {
            const uint32_t target = target0 + tile % SCORE_STAGES * TILE_BYTES;
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + i * (KEYS_APART * D * 2)), "l"(source));
                source += KEYS_APART * key_bytes;
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
    auto coefficient_row = [&](int row) {
        const int clamped = min(row, rows - 1);
        return static_cast<const uint16_t*>(p.coefficients) +
               coefficient_offset<D>(p, b, kv_head * group + clamped % group, p.first_segment + clamped / group) + t * 8;
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
    const int read0 = place(key_of_column(0, g), t);

    for (int tile = 0; tile < tiles; ++tile) {
        asm volatile("cp.async.wait_group %0;" ::"n"(SCORE_STAGES - 2));
        __syncthreads();
        load_tile(tile + SCORE_STAGES - 1);
        const int key = first_key + tile * SCORE_BLOCK;
        if (key >= warp_prefix) continue;
        const unsigned char* stage = shared + tile % SCORE_STAGES * TILE_BYTES;
        float x0[16], x1[16];
        constexpr int AT_ONCE = S2O_AT_ONCE;  // product groups: independent sums, so that products need not wait for each other
#pragma unroll
        for (int first = 0; first < 8; first += AT_ONCE) {
            float sum[AT_ONCE][4] = {};
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                uint4 k[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    // The group's keys and the load's chunks are multiples of 2 and 4 apart: exchanged as the first ones.
                    const int offset = key_of_column(first + i, 0) * (D * 2);
                    k[i] = *reinterpret_cast<const uint4*>(stage + (read0 ^ (j * 64)) + offset);
                }
#pragma unroll
                for (int part = 0; part < 2; ++part) {
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) Packed<T>::mma(sum[i], a[part][2 * j], k[i].x, k[i].y);
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) Packed<T>::mma(sum[i], a[part][2 * j + 1], k[i].z, k[i].w);
                }
                if constexpr (SECOND) {
                    using Square = Packed<__nv_bfloat16>;
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) {
                        Square::mma(sum[i], a[2][2 * j], Packed<T>::squares_bf16(k[i].x), Packed<T>::squares_bf16(k[i].y));
                    }
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) {
                        Square::mma(sum[i], a[2][2 * j + 1], Packed<T>::squares_bf16(k[i].z), Packed<T>::squares_bf16(k[i].w));
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = 2 * (first + i);
                x0[at] = sum[i][0];
                x0[at + 1] = sum[i][1];
                x1[at] = sum[i][2];
                x1[at + 1] = sum[i][3];
            }
        }
        auto store = [&](float(&x)[16], int64_t out, int prefix) {
            const int64_t at = out + key;
            store_row_codes(x, key < prefix, p.scores + at, p.score_ranges + at / SCORE_BLOCK * 2, lane);
        };
        store(x0, out0, prefix0);
        store(x1, out1, prefix1);
    }
}

}  // namespace s2o
