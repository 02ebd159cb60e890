// Finishing a nearly sorted array of 32-bit keys in shared memory: each key is already inside its bucket, and only
// the order inside the buckets is left.
//
// Sorting blocks of 16, then blocks of 16 shifted by 8, and so on is odd-even transposition of sorted runs of 8: a
// bucket of m keys lies in at most (m - 2) / 8 + 2 such runs and is in order after as many rounds. A thread sorts its
// block in registers by a network; longer buckets are left to a bitonic sort of the whole array.
#pragma once
#include <cstdint>

namespace s2o {

constexpr int NETWORK = 16;
constexpr int NETWORK_ROUNDS_MAX = 24;

// Where entry i lies: neighbouring lanes' 16-byte pieces of their blocks fall into different banks.
__device__ __forceinline__ int spread_banks(int i) { return i ^ ((i >> 3) & 12); }

__device__ __forceinline__ void order(uint32_t& a, uint32_t& b) {
    const uint32_t low = min(a, b);
    b = max(a, b);
    a = low;
}

// Batcher's odd-even merge sort, by templates: the entries stay in registers only if every index is a constant.
template <int FIRST, int COUNT, int STEP>
__device__ __forceinline__ void merge_halves(uint32_t (&x)[NETWORK]) {
    if constexpr (2 * STEP < COUNT) {
        merge_halves<FIRST, COUNT, 2 * STEP>(x);
        merge_halves<FIRST + STEP, COUNT, 2 * STEP>(x);
#pragma unroll
        for (int i = FIRST + STEP; i + STEP < FIRST + COUNT; i += 2 * STEP) order(x[i], x[i + STEP]);
    } else {
        order(x[FIRST], x[FIRST + STEP]);
    }
}
template <int FIRST = 0, int COUNT = NETWORK>
__device__ __forceinline__ void sort_network(uint32_t (&x)[NETWORK]) {
    if constexpr (COUNT > 1) {
        sort_network<FIRST, COUNT / 2>(x);
        sort_network<FIRST + COUNT / 2, COUNT / 2>(x);
        merge_halves<FIRST, COUNT, 1>(x);
    }
}

// One round; `shift` is 0 or NETWORK / 2. Entries up to the next multiple of NETWORK past count + NETWORK must be
// there and sort last.
__device__ __forceinline__ void network_round(uint32_t* entries, int count, int shift) {
    for (int first = threadIdx.x * NETWORK + shift; first < count; first += blockDim.x * NETWORK) {
        uint32_t x[NETWORK];
#pragma unroll
        for (int i = 0; i < NETWORK; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(entries + spread_banks(first + i));
            x[i] = v.x;
            x[i + 1] = v.y;
            x[i + 2] = v.z;
            x[i + 3] = v.w;
        }
        sort_network(x);
#pragma unroll
        for (int i = 0; i < NETWORK; i += 4) {
            *reinterpret_cast<uint4*>(entries + spread_banks(first + i)) = make_uint4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        }
    }
    __syncthreads();
}

// Bitonic sort in which every exchange puts the smaller first, so that an array of any length needs no padding.
__device__ __forceinline__ void bitonic_sort(uint32_t* entries, int count) {
    for (int size = 2; size < 2 * count; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            const int flip = stride == size / 2 ? size - 1 : stride;
            for (int pair = threadIdx.x; pair * 2 < count + size; pair += blockDim.x) {
                const int i = pair / stride * 2 * stride + pair % stride, j = i ^ flip;
                if (j < count) order(entries[spread_banks(i)], entries[spread_banks(j)]);
            }
            __syncthreads();
        }
    }
}

// Sorts entries whose buckets hold at most `largest`. All threads call it after a barrier; ends with one.
__device__ __forceinline__ void finish_order(uint32_t* entries, int count, int largest) {
    if (largest < 2) return;
    const int rounds = (largest - 2) / (NETWORK / 2) + 2;
    if (rounds > NETWORK_ROUNDS_MAX) {
        bitonic_sort(entries, count);
        return;
    }
    for (int round = 0; round < rounds; ++round) network_round(entries, count, round % 2 * (NETWORK / 2));
}

}  // namespace s2o
