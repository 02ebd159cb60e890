// Completes the sort of 32-bit keys in shared memory: each key is already in its bucket, only the order inside the
// buckets is left.
//
// Sorting blocks of 16, then blocks of 16 shifted by 8, and so on is odd-even transposition of sorted runs of 8: a
// bucket of m keys lies in at most (m - 2) / 8 + 2 such runs and is in order after as many rounds. A thread sorts its
// block in registers with a network, and from the second round on merges its two runs. Longer buckets first go through
// a bitonic sort.
#pragma once
#include <cstdint>

namespace s2o {

constexpr int NETWORK = 16;

// Place of entry i, such that the 16-byte pieces of neighbouring lanes fall into different banks.
__device__ __forceinline__ uint32_t spread_banks(uint32_t i) { return i ^ ((i >> 3) & 12); }

__device__ __forceinline__ void order(uint32_t& a, uint32_t& b) {
    const uint32_t low = min(a, b);
    b = max(a, b);
    a = low;
}

// Batcher's odd-even merge sort, as templates: the entries stay in registers only if every index is a constant.
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

// Sorts `entries[0..count)`, whose buckets hold at most `largest` entries. Entries up to count + 2 * NETWORK must exist
// and sort last. All threads call it after a barrier; it ends with a barrier.
__device__ __forceinline__ void network_rounds(uint32_t* entries, int count, int largest) {
    const int rounds = largest < 2 ? 0 : (largest - 2) / (NETWORK / 2) + 2;
    for (int round = 0; round < rounds; ++round) {
        for (int first = threadIdx.x * NETWORK + round % 2 * (NETWORK / 2); first < count;
             first += blockDim.x * NETWORK) {
            // Two sorted runs that are already in order need no merge: most runs, once the short buckets are done.
            if (round >= 2 &&
                entries[spread_banks(first + NETWORK / 2 - 1)] <= entries[spread_banks(first + NETWORK / 2)]) continue;
            uint32_t x[NETWORK];
            uint4* pieces[NETWORK / 4];
#pragma unroll
            for (int i = 0; i < NETWORK / 4; ++i) {
                pieces[i] = reinterpret_cast<uint4*>(entries + spread_banks(first + 4 * i));
                const uint4 v = *pieces[i];
                x[4 * i] = v.x;
                x[4 * i + 1] = v.y;
                x[4 * i + 2] = v.z;
                x[4 * i + 3] = v.w;
            }
            if (round == 0) sort_network(x);
            else merge_halves<0, NETWORK, 1>(x);
#pragma unroll
            for (int i = 0; i < NETWORK / 4; ++i)
                *pieces[i] = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        }
        __syncthreads();
    }
}

// Bitonic sort of entries[begin .. begin + count) by `threads` threads, of which this is number `thread`; `meet` is
// their barrier. Every exchange puts the smaller entry first, so that no length needs padding.
template <class Meet>
__device__ __forceinline__ void bitonic_sort(uint32_t* entries, int begin, int count, int thread, int threads,
                                             Meet meet) {
    for (int size = 2; size < 2 * count; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            const int flip = stride == size / 2 ? size - 1 : stride;
            for (int pair = thread; pair * 2 < count + size; pair += threads) {
                const int i = 2 * pair - (pair & (stride - 1)), j = i ^ flip;
                if (j < count) order(entries[spread_banks(begin + i)], entries[spread_banks(begin + j)]);
            }
            meet();
        }
    }
}

}  // namespace s2o
