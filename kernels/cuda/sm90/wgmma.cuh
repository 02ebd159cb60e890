// Warpgroup matrix instructions of sm_90a and the shared-memory descriptors they read.
//
// A tile of ROWS x head_dim 16-bit values lies in panels of 64 columns. A panel is ROWS lines of 128 bytes, 1024-byte
// aligned, with the 128-byte swizzle: the 16-byte chunk c of row r is stored at chunk c ^ (r & 7). Queries, keys and
// values share this layout; only the descriptors differ.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace s2o::sm90 {

// ---- descriptors ----
// address/16 in bits 0-13, leading offset/16 in 16-29, stride offset/16 in 32-45, swizzle in 62-63

// The upper half is constant: 8-row groups are 1024 bytes apart, 128-byte swizzle. Functions take the lower half only,
// so that a step along a tile is one 32-bit addition.
constexpr uint32_t DESCRIPTOR_HIGH = (1u << 30) | (1024 >> 4);

// Rows are M or N, the 128-byte lines run along K. Next 16 columns: +32 bytes inside a panel.
__device__ __forceinline__ uint32_t descriptor_k_major(uint32_t address) {
    return (1u << 16) | ((address & 0x3FFFF) >> 4);
}
// Rows are K (the keys), the lines run along N (head_dim): panels are `panel_bytes` apart. Next 16 keys: +2048 bytes.
__device__ __forceinline__ uint32_t descriptor_n_major(uint32_t address, uint32_t panel_bytes) {
    return ((panel_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}
__device__ __forceinline__ constexpr uint32_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

// Tells the compiler that all lanes agree: descriptors then step in uniform registers, from which wgmma reads them.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
    uint32_t y;
    asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// ---- ordering ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS_LEFT) : "memory");
}
// Keeps the compiler from moving uses of the registers across this point while a wgmma still owns them.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(int32_t (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}
// Returns x, but makes it depend on `product`, an accumulator that has been waited for: ptxas, which otherwise moves
// arithmetic across waits, cannot use x before the wait. No product equals the NaN that it is compared with.
__device__ __forceinline__ float behind(float x, float product) {
    float y;
    asm("{\n.reg .pred p;\nsetp.eq.b32 p, %2, 0x7fa00001;\nselp.f32 %0, 0f7fc00000, %1, p;\n}"
        : "=f"(y)
        : "f"(x), "r"(__float_as_uint(product)));
    return y;
}

// ---- instructions ----

// Operands of an asm statement by 32, and the accumulators that they are.
#define S2O_REGISTERS_0                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define S2O_REGISTERS_32                                                               \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define S2O_REGISTERS_64                                                               \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define S2O_REGISTERS_96                                                                           \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define S2O_REGISTERS_TO_63 S2O_REGISTERS_0 ", " S2O_REGISTERS_32
#define S2O_REGISTERS_TO_95 S2O_REGISTERS_TO_63 ", " S2O_REGISTERS_64
#define S2O_REGISTERS_TO_127 S2O_REGISTERS_TO_95 ", " S2O_REGISTERS_96
// `kind`: "+f" or, for integers, "+r".
#define S2O_8_SUMS(kind, d, i)                                                                                \
    kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), kind(d[i + 6]), \
        kind(d[i + 7])
#define S2O_32_SUMS(kind, d, i) \
    S2O_8_SUMS(kind, d, i), S2O_8_SUMS(kind, d, i + 8), S2O_8_SUMS(kind, d, i + 16), S2O_8_SUMS(kind, d, i + 24)
#define S2O_SUMS_32(d) S2O_32_SUMS("+f", d, 0)
#define S2O_SUMS_64(d) S2O_SUMS_32(d), S2O_32_SUMS("+f", d, 32)
#define S2O_SUMS_96(d) S2O_SUMS_64(d), S2O_32_SUMS("+f", d, 64)
#define S2O_SUMS_128(d) S2O_SUMS_96(d), S2O_32_SUMS("+f", d, 96)
#define S2O_INTEGER_SUMS_128(d) \
    S2O_32_SUMS("+r", d, 0), S2O_32_SUMS("+r", d, 32), S2O_32_SUMS("+r", d, 64), S2O_32_SUMS("+r", d, 96)

// d (64 x columns) = a (64 x 16) b^T + ACCUMULATE * d; both from shared memory, both K-major. The last four
// arguments are the numbers of the operands after d.
#define S2O_SS_STATEMENT(type, columns, registers, operands, a, b, accumulate, high)                                  \
    asm volatile(                                                                                                     \
        "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                                         \
        "setp.ne.b32 p, %" #accumulate ", 0;\nmov.b64 a, {%" #a ", %" #high "};\nmov.b64 b, {%" #b ", %" #high "};\n" \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" registers                          \
        "}, a, b, p, 1, 1, 0, 0;\n}"                                                                                  \
        : operands(d)                                                                                                 \
        : "r"(desc_a), "r"(desc_b), "n"(ACCUMULATE), "n"(DESCRIPTOR_HIGH))
#define S2O_SS(columns, ...)                                                                              \
    template <typename T, int ACCUMULATE>                                                                 \
    __device__ __forceinline__ void wgmma_ss(float (&d)[columns / 2], uint32_t desc_a, uint32_t desc_b) { \
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                 \
            S2O_SS_STATEMENT("bf16", columns, __VA_ARGS__);                                               \
        } else {                                                                                          \
            S2O_SS_STATEMENT("f16", columns, __VA_ARGS__);                                                \
        }                                                                                                 \
    }

S2O_SS(64, S2O_REGISTERS_0, S2O_SUMS_32, 32, 33, 34, 35)
S2O_SS(128, S2O_REGISTERS_TO_63, S2O_SUMS_64, 64, 65, 66, 67)

// d (64 x columns) += a (64 x 16, registers) b (16 x columns, shared memory, N contiguous). Arguments as above.
#define S2O_RS_STATEMENT(type, columns, registers, operands, a0, a1, a2, a3, b, high)        \
    asm volatile(                                                                            \
        "{\n.reg .b64 b;\nmov.b64 b, {%" #b ", %" #high "};\n"                               \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" registers \
        "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, b, 1, 1, 1, 1;\n}"                     \
        : operands(d)                                                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc_b), "n"(DESCRIPTOR_HIGH))
#define S2O_RS(columns, ...)                                                                                \
    template <typename T>                                                                                   \
    __device__ __forceinline__ void wgmma_rs(float (&d)[columns / 2], const uint32_t* a, uint32_t desc_b) { \
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                   \
            S2O_RS_STATEMENT("bf16", columns, __VA_ARGS__);                                                 \
        } else {                                                                                            \
            S2O_RS_STATEMENT("f16", columns, __VA_ARGS__);                                                  \
        }                                                                                                   \
    }

S2O_RS(64, S2O_REGISTERS_0, S2O_SUMS_32, 32, 33, 34, 35, 36, 37)
S2O_RS(128, S2O_REGISTERS_TO_63, S2O_SUMS_64, 64, 65, 66, 67, 68, 69)
S2O_RS(192, S2O_REGISTERS_TO_95, S2O_SUMS_96, 96, 97, 98, 99, 100, 101)
S2O_RS(256, S2O_REGISTERS_TO_127, S2O_SUMS_128, 128, 129, 130, 131, 132, 133)

// d (64 x 256) = a b^T + accumulate * d, for 32 bytes of the rows of a and b; both from shared memory, both K-major.
#define S2O_256_STATEMENT(instruction, operands, flags)                                                               \
    asm volatile(                                                                                                     \
        "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                                         \
        "setp.ne.b32 p, %130, 0;\nmov.b64 a, {%128, %131};\nmov.b64 b, {%129, %131};\n"                               \
        "wgmma.mma_async.sync.aligned." instruction " {" S2O_REGISTERS_TO_127 "}, a, b, p" flags ";\n}"               \
        : operands(d)                                                                                                 \
        : "r"(desc_a), "r"(desc_b), "r"(accumulate), "n"(DESCRIPTOR_HIGH))

// 16-bit numbers.
template <typename T>
__device__ __forceinline__ void wgmma_256(float (&d)[128], uint32_t desc_a, uint32_t desc_b, int accumulate) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        S2O_256_STATEMENT("m64n256k16.f32.bf16.bf16", S2O_SUMS_128, ", 1, 1, 0, 0");
    } else {
        S2O_256_STATEMENT("m64n256k16.f32.f16.f16", S2O_SUMS_128, ", 1, 1, 0, 0");
    }
}
// 8-bit integers, whatever T is.
template <typename T>
__device__ __forceinline__ void wgmma_256(int32_t (&d)[128], uint32_t desc_a, uint32_t desc_b, int accumulate) {
    S2O_256_STATEMENT("m64n256k32.s32.s8.s8", S2O_INTEGER_SUMS_128, "");
}

#undef S2O_REGISTERS_0
#undef S2O_REGISTERS_32
#undef S2O_REGISTERS_64
#undef S2O_REGISTERS_96
#undef S2O_REGISTERS_TO_63
#undef S2O_REGISTERS_TO_95
#undef S2O_REGISTERS_TO_127
#undef S2O_8_SUMS
#undef S2O_32_SUMS
#undef S2O_SUMS_32
#undef S2O_SUMS_64
#undef S2O_SUMS_96
#undef S2O_SUMS_128
#undef S2O_INTEGER_SUMS_128
#undef S2O_SS_STATEMENT
#undef S2O_SS
#undef S2O_RS_STATEMENT
#undef S2O_256_STATEMENT
#undef S2O_RS

}  // namespace s2o::sm90
