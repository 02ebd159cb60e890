// Exact attention with everything that FlashAttention's interface has: windows, ALiBi, softcap, ranges of positions that
// see each other, sequences of different lengths, keys and values in pages, head_dim up to 512. Portable (sm_80).
//
// Four warps of 32 query rows, or up to eight of 16. Keys and values come in tiles of 64 through a ring in shared memory,
// whose rows are read by index: a row of the tensor, of a sequence, or of a page. head_dim is a compile-time size that is
// at least the tensors'; the columns beyond it are zeros in shared memory. Above 256 an item computes half of the output's
// columns.
#include "flash_ring.cuh"
#include "launch.cuh"
#include "online_softmax.cuh"
#include "pair.cuh"
#include "score_modifiers.cuh"

namespace s2o::flash {

// The keys that the rows of one warp see in one tile.
template <class X>
struct Visibility {
    int first_row, last_row;  // positions of the warp's rows
    int first_key;            // of the tile

    __device__ __forceinline__ bool all(const FlashParams& p, const Item& w) const {
        return first_key >= last_row - p.left && first_key + KEYS - 1 <= first_row + p.right &&
               first_key + KEYS <= w.k_len;
    }
    __device__ __forceinline__ bool none(const FlashParams& p) const {
        return p.num_ranges == 0 && (first_key > last_row + p.right || first_key + KEYS - 1 < first_row - p.left);
    }
    __device__ __forceinline__ void mask(float (&s)[X::FRAGMENTS][KEYS / 2], const FlashParams& p,
                                         const Item& w) const {
        const int lane = thread_index() % 32;
#pragma unroll
        for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int row = first_row + m * 16 + 8 * (i >> 1 & 1) + lane / 4;
                const int key = first_key + 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
                bool sees = key >= row - p.left && key <= row + p.right;
                for (int r = 0; r < p.num_ranges && !sees; ++r) {
                    const int2 range = w.range(p, r);
                    sees = row >= range.x && row < range.y && key >= range.x && key < range.y;
                }
                if (!sees || key >= w.k_len) s[m][i] = -INFINITY;
            }
        }
    }
};

template <class X>
__device__ __forceinline__ void store(const FlashParams& p, const Item& w, char* q,
                                      const float (&acc)[X::FRAGMENTS][X::V_DIM / 2],
                                      const OnlineSoftmax (&softmax)[X::FRAGMENTS]) {
    using T = typename X::T;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = warp * X::WARP_ROWS + m * 16 + h * 8 + lane / 4;
            const float factor = inverse_mass(softmax[m].row_sum[h]);
#pragma unroll
            for (int i = 0; i < X::V_DIM / 8; ++i) {
                char* const pair = q + r * X::ROW + ((i ^ (r & 7)) << 4) + 4 * (lane % 4);
                *reinterpret_cast<uint32_t*>(pair) =
                    pack<T>(acc[m][4 * i + 2 * h] * factor, acc[m][4 * i + 2 * h + 1] * factor);
            }
        }
    }
    __syncwarp();
    const int64_t batch = p.q_starts != nullptr ? 0 : w.batch * p.out_strides.batch;
    T* const head = static_cast<T*>(p.out) + batch + w.head * p.out_strides.head;
    for_each_chunk<X, X::V_DIM>(q, [&](int r, const char* chunk, int column) {
        const int row = w.q_start + r;
        column += first_column<X>(w);
        if (column >= p.head_dim || row >= w.q_len) return;
        *reinterpret_cast<uint4*>(head + (w.q_base + row) * p.out_strides.seq + column) =
            *reinterpret_cast<const uint4*>(chunk);
    });
}

template <class X>
__device__ __forceinline__ void attend(const Shared<X>& shared, const FlashParams& p) {
    const Item& w = shared.control().item;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t batch = p.q_starts != nullptr ? 0 : w.batch * p.q_strides.batch;
    const char* const head = static_cast<const char*>(p.q) + 2 * (batch + w.head * p.q_strides.head);
    for_each_chunk<X, X::HEAD_DIM>(shared.q(), [&](int r, char* chunk, int column) {
        const int row = w.q_start + r;
        const bool exists = column < p.head_dim && row < w.q_len;
        const int64_t offset = exists ? (w.q_base + row) * p.q_strides.seq + column : 0;
        cp_async_16(smem_address(chunk), head + 2 * offset, exists);
    });
    Ring<X> ring(shared, p);
    ring.start();

    OnlineSoftmax softmax[X::FRAGMENTS];
    float acc[X::FRAGMENTS][X::V_DIM / 2];
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
        for (int i = 0; i < X::V_DIM / 2; ++i) acc[m][i] = 0.f;
    }
    const uint32_t q = smem_address(shared.q()) + warp * X::WARP_ROWS * X::ROW + rows_first<X::ROW>(lane);
    const int first_row = w.position + warp * X::WARP_ROWS;
    cp_async_wait<X::RING_SLOTS - 2>();  // the queries arrive with the first keys; a warp loads its own
    __syncwarp();

    // Descending: with ALiBi and in windows the first tile then has the highest scores, and later ones raise no maximum.
    const ScoreModifiers& modifiers = shared.control().modifiers;
    for (int tile = w.end_tile - 1; tile >= w.key_tile; --tile) {
        const Visibility<X> visibility{first_row, first_row + X::WARP_ROWS - 1, tile * KEYS};
        const bool visible = !visibility.none(p);
        float s[X::FRAGMENTS][KEYS / 2];
        uint32_t probs[X::FRAGMENTS][KEYS / 4];
        const float scale_log2 = modifiers.unit * LOG2_E;
        auto exponentials = [&](int m, int k, int i) {
            return softmax[m].template add<typename X::T, true>(s[m] + 8 * k, i, scale_log2);
        };
        const uint32_t k = ring.next() + columns_first<X::ROW>(thread_index() % 32);
        if (visible) {
            multiply_keys<typename X::T, X::HEAD_DIM, X::ROW, KEYS>(s, k, [&](int d, uint32_t (&a)[X::FRAGMENTS][4]) {
#pragma unroll
                for (int m = 0; m < X::FRAGMENTS; ++m) ldmatrix(a[m], column_step(q, d) + m * 16 * X::ROW);
            });
#pragma unroll
            for (int m = 0; m < X::FRAGMENTS; ++m) {
                const int lane = thread_index() % 32;
                const int apart = first_row + m * 16 + lane / 4 - tile * KEYS - 2 * (lane % 4);
                modifiers.apply(s[m], p.right == 0 && p.num_ranges == 0, apart);
            }
            if (!visibility.all(p, w)) visibility.mask(s, p, w);
            raise_maxima<true, true>(softmax, s, scale_log2,
                                     [&](int m, const float (&factors)[2]) { rescale_rows(acc[m], factors); });
            if constexpr (!X::OVERLAPS) {
#pragma unroll
                for (int m = 0; m < X::FRAGMENTS; ++m) {
#pragma unroll
                    for (int k = 0; k < KEYS / 16; ++k) {
                        softmax[m].template add<typename X::T, true>(s[m] + 8 * k, scale_log2, probs[m] + 4 * k);
                    }
                }
            }
        }
        const uint32_t v = ring.next() + rows_first<X::ROW>(thread_index() % 32);
        if constexpr (X::OVERLAPS) {
            if (visible) add_values<typename X::T, X::ROW, KEYS, X::AHEAD>(acc, v, exponentials);
        } else if (visible) {
            add_values<typename X::T, X::ROW, KEYS>(acc, v, [&](int m, int k, int i) { return probs[m][4 * k + i]; });
        }
    }
    // Loads beyond the last tile, or those of the queries if there is no tile.
    cp_async_wait<0>();
#pragma unroll
    for (int m = 0; m < X::FRAGMENTS; ++m) softmax[m].finish();
    store<X>(p, w, shared.q(), acc, softmax);
}

// Finds the next item that exists. A block's first item is its index; the others come from the counter.
template <class X>
__device__ __noinline__ void take_item(const FlashParams& p, Control& control) {
    const int items_of_sequence = p.num_heads * ((p.q_len + X::ROWS - 1) / X::ROWS) * X::PARTS;
    const int items = p.batch * items_of_sequence;
    auto advance = [&] { control.next = gridDim.x + atomicAdd(p.next_item, 1); };
    auto exists = [&](int item) {
        return !skips_sequence(p, item / items_of_sequence, items_of_sequence) &&
               decode(p, item, X::ROWS, X::PARTS, control.item);
    };
    while (control.next < items && !exists(control.next)) advance();
    control.end = control.next >= items;
    if (control.end) return;
    control.modifiers = ScoreModifiers(p, control.item.head);
    advance();
}

template <class X>
__device__ __forceinline__ void attention(const FlashParams& p) {
    extern __shared__ __align__(1024) char raw[];
    const Shared<X> shared{raw};
    Control& control = shared.control();
    if (threadIdx.x == 0) control.next = blockIdx.x;
    for (;;) {
        if (threadIdx.x == 0) take_item<X>(p, control);
        __syncthreads();
        if (control.end) return;
        attend<X>(shared, p);
        __syncthreads();
    }
}

}  // namespace s2o::flash

#define S2O_KERNEL(name, T, head_dim)                                                                          \
    extern "C" {                                                                                               \
    __constant__ s2o::LaunchInfo name##_launch = {                                                             \
        s2o::flash::Traits<T, head_dim>::THREADS, s2o::flash::Shared<s2o::flash::Traits<T, head_dim>>::BYTES,  \
        s2o::flash::Traits<T, head_dim>::BLOCKS_PER_SM, 0};                                                    \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(s2o::flash::Traits<T, head_dim>::THREADS,                    \
                                                 s2o::flash::Traits<T, head_dim>::BLOCKS_PER_SM)               \
        name(const __grid_constant__ s2o::FlashParams p) {                                                     \
        s2o::flash::attention<s2o::flash::Traits<T, head_dim>>(p);                                             \
    }

#define S2O_KERNELS(head_dim)                                     \
    S2O_KERNEL(s2o_flash_bf16_##head_dim, __nv_bfloat16, head_dim) \
    S2O_KERNEL(s2o_flash_f16_##head_dim, __half, head_dim)

S2O_KERNELS(64)
S2O_KERNELS(96)
S2O_KERNELS(128)
S2O_KERNELS(160)
S2O_KERNELS(192)
S2O_KERNELS(224)
S2O_KERNELS(256)
S2O_KERNELS(512)
