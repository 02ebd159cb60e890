// Scores of the keys before each segment: coefficients (rows) times [K | K*K] (columns) on the tensor cores, coded in
// 16 bits. Rows are the (segment, head) pairs that share a KV head, so each key is read once for many rows.
//
// A warp keeps the coefficients of its 16 rows in registers; with head_dim 256 it reads them again for every tile. The
// order of the contraction index and of the keys in a tile is free, and chosen so that
//  - a lane's 16-byte load (8 consecutive dimensions) is its share of two m16n8k16 products, for both operands;
//  - a lane ends with 8 consecutive keys of a row, one 16-byte store.
//
// Codes are linear between the least and the greatest of the SCORE_BLOCK scores of a row's tile, so their resolution is
// never worse than the row's range / 49000, whatever the scores' size or offset.
#pragma once
#include <cstdint>

#include "mma.cuh"
#include "ranking_element.cuh"
#include "ranking_params.cuh"

namespace s2o {

constexpr int SCORE_WARPS = 4;  // of a CTA, at most
constexpr int SCORE_THREADS = SCORE_WARPS * 32;
constexpr int SCORE_STAGES = 3;  // at most
static_assert(SCORE_WARPS == 4 && SCORE_STAGES == 3 && SCORE_BLOCK == 64, "mirrored on the host");

template <int D>
constexpr int SCORE_TILE_BYTES = SCORE_BLOCK * D * 2;

// Key of the tile that lane group `n` (0..7) feeds to product group i: thread t of a quad owns 8t..8t+7 of each 32.
__device__ __forceinline__ int key_of_column(int i, int n) { return 32 * (i / 4) + 8 * (n / 2) + 2 * (i % 4) + n % 2; }

template <int FIRST = 0, int COUNT = 16, class Join>
__device__ __forceinline__ float join_tree(const float (&x)[16], Join join) {
    if constexpr (COUNT == 1) return x[FIRST];
    else return join(join_tree<FIRST, COUNT / 2>(x, join), join_tree<FIRST + COUNT / 2, COUNT / 2>(x, join));
}

// Stores the codes of this lane's 16 scores of two rows; a quad holds the whole tile of a row. Whole warps call it;
// `codes` is null for a row that is not to be stored.
__device__ __forceinline__ void store_codes(float (&x)[2][16], uint16_t* const (&codes)[2], float* const (&ranges)[2],
                                            int lane) {
    float low[2], high[2];
    auto find_extremes = [&] {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            low[r] = join_tree(x[r], [](float a, float b) { return fminf(a, b); });
            high[r] = join_tree(x[r], [](float a, float b) { return fmaxf(a, b); });
        }
#pragma unroll
        for (int s = 1; s < 4; s *= 2) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                low[r] = fminf(low[r], __shfl_xor_sync(~0u, low[r], s));
                high[r] = fmaxf(high[r], __shfl_xor_sync(~0u, high[r], s));
            }
        }
    };
    find_extremes();
    // fminf and fmaxf ignore NaN; a sum does not. The result stays correct if a sum of finite scores overflows.
    bool finite[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) finite[r] = fabsf(join_tree(x[r], [](float a, float b) { return a + b; })) < INFINITY;
    if (__any_sync(~0u, !(finite[0] && finite[1]))) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            finite[r] = (__ballot_sync(~0u, !finite[r]) >> (lane & 28) & 15) == 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) x[r][i] = fabsf(x[r][i]) < INFINITY ? x[r][i] : NAN;
        }
        find_extremes();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float span = high[r] - low[r];
        const bool spread = span > 1e-30f && span < INFINITY;
        const float per_unit = spread ? __fdividef(SCORE_CODE_SPAN, span) : 0.f;
        // Arithmetic on NaN gives 0x7fffffff, whose bits 8..23 are SCORE_NOT_FINITE.
        uint32_t words[8];
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const float even = fmaf(x[r][2 * w] - low[r], per_unit, SCORE_CODE_START);
            const float odd = fmaf(x[r][2 * w + 1] - low[r], per_unit, SCORE_CODE_START);
            words[w] = __byte_perm(__float_as_uint(even), __float_as_uint(odd), 0x6521);
        }
        if (codes[r]) {
            uint4* out = reinterpret_cast<uint4*>(codes[r] + 8 * (lane % 4));
            out[0] = make_uint4(words[0], words[1], words[2], words[3]);
            out[4] = make_uint4(words[4], words[5], words[6], words[7]);
            if (lane % 4 == 0) {
                const float factor = spread ? span * (1.f / SCORE_CODE_SPAN) : 0.f;
                // A negative factor says that codes may be SCORE_NOT_FINITE.
                *reinterpret_cast<float2*>(ranges[r]) =
                    make_float2(finite[r] ? factor : -factor, fmaf(-SCORE_CODE_START, factor, low[r]));
            }
        }
    }
}

// Grid (shares, ceil(num_segments * group / rows of a CTA), batch * num_kv_heads): equal shares of the key tiles of the
// longest prefix, with few tiles while there are few CTAs, otherwise 16 to amortise the load of the coefficients. One, two or
// four warps with 16 rows each, two or more with D = 256. Dynamic shared memory of two or three tiles.
template <typename T, int D, bool SECOND>
__device__ __forceinline__ void key_scores(const RankingParams& p) {
    constexpr int CHUNKS = D / 8;      // of 16 bytes in a key
    constexpr int LOADS = D / 32;      // 16-byte loads of a lane per key or row, two products each
    constexpr int TILE_BYTES = SCORE_TILE_BYTES<D>;
    constexpr int PIECES = SCORE_BLOCK * CHUNKS / SCORE_THREADS;  // of a tile, per thread of four warps
    extern __shared__ __align__(128) unsigned char shared[];
    const int group = p.num_heads / p.num_kv_heads, rows = p.num_segments * group;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warps = blockDim.x / 32, cta_rows = 16 * warps;
    // Longest prefixes first. They rotate over the warps of a CTA, so that no scheduler gets all the short prefixes.
    const int cta_row = (gridDim.y - 1 - blockIdx.y) * cta_rows;
    const int warp_row = cta_row + (threadIdx.x / 32 + blockIdx.x + blockIdx.z) % warps * 16;
    const int last_segment = p.first_segment + min(cta_row + cta_rows - 1, rows - 1) / group;
    const int per_segment = p.segment_len / SCORE_BLOCK;
    const int share = ((p.first_segment + p.num_segments - 1) * per_segment + gridDim.x - 1) / gridDim.x;
    const int first_tile = blockIdx.x * share, tiles = min(share, last_segment * per_segment - first_tile);
    if (tiles <= 0) return;
    const int b = blockIdx.z / p.num_kv_heads, kv_head = blockIdx.z % p.num_kv_heads;
    const int first_key = first_tile * SCORE_BLOCK;

    // Odd keys exchange the halves of each 128-byte line: two keys' 64-byte pieces then lie in different banks.
    auto place = [](int key, int chunk) { return key * (D * 2) + (chunk ^ ((key & 1) << 2)) * 16; };
    // Consecutive pieces of a thread are an even number of keys apart.
    const int keys_apart = blockDim.x / CHUNKS;
    const int key0 = threadIdx.x / CHUNKS, chunk0 = threadIdx.x % CHUNKS;
    const uint32_t target0 = smem_address(shared) + place(key0, chunk0);
    const int64_t key_bytes = p.k_strides.seq * 2;
    const T* k = static_cast<const T*>(p.k) + b * p.k_strides.batch + kv_head * p.k_strides.head;
    const char* source = reinterpret_cast<const char*>(k) + (first_key + key0) * key_bytes + chunk0 * 16;
    const int64_t source_step = keys_apart * key_bytes;
    uint32_t shared_bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared_bytes));
    const bool is_deep = shared_bytes == SCORE_STAGES * TILE_BYTES;  // three stages, otherwise two
    auto next = [&](uint32_t stage) { return stage + TILE_BYTES == shared_bytes ? 0 : stage + TILE_BYTES; };
    uint32_t loaded = 0, computed = 0;  // stages, as offsets
    auto load_tile = [&](int tile) {
        if (tile < tiles) {
            uint32_t target = target0 + loaded;
            for (int round = warps; round <= SCORE_WARPS; round += warps) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source));
                    target += keys_apart * (D * 2);
                    source += source_step;
                }
            }
        }
        loaded = next(loaded);
        asm volatile("cp.async.commit_group;");
    };
    load_tile(0);
    if (is_deep) load_tile(1);

    // Of two products for each load of a lane. Part 0 is the mean, part 1 the variance.
    constexpr int PARTS = SECOND ? 2 : 1;
    constexpr bool KEPT = D <= 128;
    uint32_t kept[KEPT ? LOADS : 1][PARTS][2][4];
    int prefix[2];   // of this lane's two rows; 0 for a row that does not exist
    int64_t out[2];
    const uint16_t* coefficients[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = warp_row + g + 8 * r, segment = min(row, rows - 1) / group, n = p.first_segment + segment;
        const int head = kv_head * group + min(row, rows - 1) - segment * group;
        prefix[r] = row < rows ? n * p.segment_len : 0;
        out[r] = (b * p.num_heads + head) * p.kv_perm_head_stride + prefix_row(p, n);
        coefficients[r] = static_cast<const uint16_t*>(p.coefficients) + coefficient_offset<D>(p, b, head, n) + t * 8;
    }
    const int warp_prefix = __reduce_max_sync(~0u, max(prefix[0], prefix[1]));
    auto read = [&](uint32_t (&a)[PARTS][2][4], int j) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const uint4 x = *reinterpret_cast<const uint4*>(coefficients[0] + part * D + j * 32);
            const uint4 y = *reinterpret_cast<const uint4*>(coefficients[1] + part * D + j * 32);
            const uint32_t even[4] = {x.x, y.x, x.y, y.y}, odd[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[part][0][i] = even[i];
                a[part][1][i] = odd[i];
            }
        }
    };
    if constexpr (KEPT) {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) read(kept[j], j);
    }
    const int read0 = place(key_of_column(0, g), t);

    for (int tile = 0; tile < tiles; ++tile) {
        if (is_deep) asm volatile("cp.async.wait_group 1;");
        else asm volatile("cp.async.wait_group 0;");
        __syncthreads();
        load_tile(tile + (is_deep ? 2 : 1));
        const int key = first_key + tile * SCORE_BLOCK;
        const unsigned char* stage = shared + computed;
        computed = next(computed);
        if (key >= warp_prefix) continue;
        float x[2][16];
        constexpr int AT_ONCE = 8;  // product groups: independent sums, so that products need not wait for each other
#pragma unroll
        for (int first = 0; first < 8; first += AT_ONCE) {
            float sum[AT_ONCE][4] = {};
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                uint32_t(&a)[PARTS][2][4] = kept[KEPT ? j : 0];
                if constexpr (!KEPT) read(a, j);
                uint4 keys[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    // Groups are an even number of keys apart, loads 4 chunks: the exchange in `read0` holds for all.
                    const int offset = key_of_column(first + i, 0) * (D * 2);
                    keys[i] = *reinterpret_cast<const uint4*>(stage + (read0 ^ (j * 64)) + offset);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) mma<T>(sum[i], a[0][0], keys[i].x, keys[i].y);
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) mma<T>(sum[i], a[0][1], keys[i].z, keys[i].w);
                if constexpr (SECOND) {
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) {
                        mma<__nv_bfloat16>(sum[i], a[1][0], Packed<T>::squares_bf16(keys[i].x),
                                           Packed<T>::squares_bf16(keys[i].y));
                    }
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) {
                        mma<__nv_bfloat16>(sum[i], a[1][1], Packed<T>::squares_bf16(keys[i].z),
                                           Packed<T>::squares_bf16(keys[i].w));
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = 2 * (first + i);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    x[r][at] = sum[i][2 * r];
                    x[r][at + 1] = sum[i][2 * r + 1];
                }
            }
        }
        uint16_t* codes[2];
        float* ranges[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t at = out[r] + key;
            codes[r] = key < prefix[r] ? p.scores + at : nullptr;
            ranges[r] = p.score_ranges + at / SCORE_BLOCK * 2;
        }
        store_codes(x, codes, ranges, lane);
    }
}

}  // namespace s2o
