// Asynchronous copies, matrix loads and matrix products of sm_80, and the shared-memory layout that they use.
//
// A tile is rows of head_dim 16-bit values. The 16-byte chunk c of row r lies at chunk c ^ (r & 7), so that the eight
// rows of an 8x8 matrix (read directly or transposed) and the lines that copies write fall into different banks.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "shared_address.cuh"

namespace s2o {

// Reads the thread's index again, so that values derived from it occupy no register before.
__device__ __forceinline__ int thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// ---- copies ----

// Copies 16 bytes, bypassing L1. If not `exists`, writes zeros and does not read `src`.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(exists ? 16 : 0) : "memory");
}
// Copies 4 bytes. If not `exists`, writes zeros and does not read `src`.
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(exists ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}

// ---- matrix loads ----

// Loads four 8x8 matrices. Volatile, so that the load is not hoisted out of the loops that overwrite its source.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Offset in the tile of a lane's row of a 16 x 16 fragment, with the swizzle of the first 16 columns. The order of the
// four 8x8 matrices makes the registers of an operand adjacent: low rows before high rows for queries and (transposed)
// for values, low columns before high columns for keys.
template <int ROW>
__device__ __forceinline__ uint32_t rows_first(int lane) {
    return (lane & 15) * ROW + (((lane >> 4) ^ (lane & 7)) << 4);
}
template <int ROW>
__device__ __forceinline__ uint32_t columns_first(int lane) {
    return ((lane & 7) + ((lane >> 4) << 3)) * ROW + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
}
// Moves such an address by 16 i columns: the swizzle covers 64 columns, and blocks of 64 are a plain offset apart.
__device__ __forceinline__ uint32_t column_step(uint32_t address, int i) {
    return (address ^ ((i & 3) << 5)) + (i >> 2) * 128;
}

// ---- products ----

// d (16 x 8) += a (16 x 16) b (16 x 8)
template <typename T>
__device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Columns 16 n and the next 15 of d += a b, for M fragments of 16 rows. Each product shares an operand with the one before,
// which it then need not read from the registers again.
template <typename T, int M, int N>
__device__ __forceinline__ void mma_columns(float (&d)[M][N], int n, const uint32_t (&a)[M][4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int m = 0; m < M; ++m) mma<T>(d[m] + 8 * n, a[m], b[0], b[1]);
#pragma unroll
    for (int m = M - 1; m >= 0; --m) mma<T>(d[m] + 8 * n + 4, a[m], b[2], b[3]);
}

// s = Q K^T for fragments of 16 rows, and KEYS keys at address `k` (of the lane's row, see columns_first). `queries(d, a)`
// gives the operands of 16 columns.
template <typename T, int HEAD_DIM, int ROW, int KEYS, int M, class F>
__device__ __forceinline__ void multiply_keys(float (&s)[M][KEYS / 2], uint32_t k, const F& queries) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) s[m][i] = 0.f;
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
        uint32_t a[M][4];
        queries(d, a);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            uint32_t b[4];
            ldmatrix(b, column_step(k, d) + n * 16 * ROW);
            mma_columns<T>(s, n, a, b);
        }
    }
}

// acc += P V for fragments of 16 rows, and KEYS values at address `v` (of the lane's row, see rows_first).
// `probabilities(m, k, i)` gives register i of the operand of fragment m and of 16 keys. With AHEAD it is called one step
// early, spread over the columns, so that its exponentials run during the products of the 16 keys before.
template <typename T, int ROW, int KEYS, bool AHEAD = false, int M, int N, class F>
__device__ __forceinline__ void add_values(float (&acc)[M][N], uint32_t v, const F& probabilities) {
    constexpr int COLUMNS = N / 8, PARTS = 4 * M, EACH = (PARTS + COLUMNS - 1) / COLUMNS;
    uint32_t a[2][M][4];
    auto prepare = [&](int k, int part) { a[k % 2][part / 4][part % 4] = probabilities(part / 4, k, part % 4); };
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        if (!AHEAD || k == 0) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) prepare(k, part);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            uint32_t b[4];
            ldmatrix_transposed(b, column_step(v, n) + k * 16 * ROW);
            if (AHEAD && k + 1 < KEYS / 16) {
#pragma unroll
                for (int part = n * EACH; part < (n + 1) * EACH && part < PARTS; ++part) prepare(k + 1, part);
            }
            mma_columns<T>(acc, n, a[k % 2], b);
        }
    }
}

}  // namespace s2o
