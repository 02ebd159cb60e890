// Attention of one query per sequence on keys and values in 8 bits (decode.cuh, int8.cuh). A warp widens each step to the
// 16 bits that s2o_load_int8_* would write, so the result is that of s2o_decode_* on loaded rows, bit for bit, and half of
// the bytes are read.
#include "decode.cuh"
#include "int8.cuh"
#include "launch.cuh"

namespace s2o {

template <int HEAD_DIM>
struct Int8DecodeLayout {
    static constexpr int ROW_CHUNKS = HEAD_DIM / 16;             // of 16 codes
    static constexpr int ROWS_APART = 32 / ROW_CHUNKS;           // ROW_CHUNKS lanes copy a row
    static constexpr int SIDE_BYTES = WARP_KEYS * HEAD_DIM;      // codes of the keys or values of a step
    static constexpr int SCALES_BYTES = WARP_KEYS * 4;           // their scales
    static constexpr int STAGE_BYTES = 2 * (SIDE_BYTES + SCALES_BYTES);
    static constexpr int WIDE_ROW = HEAD_DIM * 2;
    static constexpr int WIDE_BYTES = 2 * WARP_KEYS * WIDE_ROW;  // keys and values of a step in 16 bits
    static constexpr int WARP_BYTES = 24 * 1024 + 512;
    static constexpr int STAGES = (WARP_BYTES - WIDE_BYTES) / STAGE_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int BYTES = DECODE_WARPS * WARP_BYTES;
    static_assert(STAGES >= 4 && WARP_BYTES % 128 == 0);
    // One block fits in the 99 KiB of the smallest GPUs, with its states; two in the 227 KiB of an H100.
    static_assert(BYTES + 1024 <= 99 * 1024);
};

__device__ __forceinline__ const SplitParams& split_params(const Int8SplitParams& p) { return p.split; }

// The ring of a warp's codes and scales, and the step that is read, in 16 bits, before it.
template <typename T, int HEAD_DIM>
class Int8DecodeRing {
    using L = Int8DecodeLayout<HEAD_DIM>;
    const uint8_t* rows[2];  // keys and values, from this lane's chunk of its first row on
    int64_t row_bytes[2];
    const float* scales;     // of this lane's key of a step, or of its value in the second half of the warp
    uint32_t wide, ring;     // addresses
    int line, chunk, lane;
    int key, end;            // this lane's first key of the next load
    int fill = 0, read = 0;  // slots, in bytes

public:
    static constexpr int BYTES = L::WARP_BYTES;

    __device__ __forceinline__ Int8DecodeRing(const Int8SplitParams& p, const DecodeItem& item, int first_key,
                                              uint32_t address, int lane_)
        : wide(address), ring(address + L::WIDE_BYTES), line(lane_ / L::ROW_CHUNKS), chunk(lane_ % L::ROW_CHUNKS),
          lane(lane_), key(first_key + line), end(item.end_key) {
        const AttnParams& attn = p.split.attn;
        const Strides &ks = attn.k_strides, &vs = attn.v_strides;
        rows[0] = static_cast<const uint8_t*>(attn.k) + item.batch * ks.batch + item.kv_head * ks.head + chunk * 16;
        rows[1] = static_cast<const uint8_t*>(attn.v) + item.batch * vs.batch + item.kv_head * vs.head + chunk * 16;
        row_bytes[0] = ks.seq;
        row_bytes[1] = vs.seq;
        scales = p.scales[lane / WARP_KEYS] + item.batch * p.scale_batch_stride + item.kv_head * p.scale_head_stride;
        for (int i = 0; i < L::STAGES - 1; ++i) load();
    }
    // Rows past the end have scale zero.
    __device__ __forceinline__ void load() {
        const int first = key - line;
        if (first < end) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const uint8_t* src = rows[side] + key * row_bytes[side];
                const uint32_t dst = ring + fill + side * L::SIDE_BYTES + chunk * 16;
#pragma unroll
                for (int i = 0; i < WARP_KEYS / L::ROWS_APART; ++i) {
                    const int r = i * L::ROWS_APART;
                    cp_async_16(dst + (line + r) * HEAD_DIM, src, key + r < end);
                    src += L::ROWS_APART * row_bytes[side];
                }
            }
            const int of_scale = first + lane % WARP_KEYS;
            cp_async_4(ring + fill + 2 * L::SIDE_BYTES + lane * 4, scales + of_scale, of_scale < end);
        }
        cp_async_commit();  // also without copies: `next` counts the groups
        key += STEP_KEYS;
        fill = fill == L::RING_BYTES - L::STAGE_BYTES ? 0 : fill + L::STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t next() {
        cp_async_wait<L::STAGES - 2>();
        __syncwarp();  // the step is here, and no lane still reads the last one
        load();
        widen();
        __syncwarp();
        read = read == L::RING_BYTES - L::STAGE_BYTES ? 0 : read + L::STAGE_BYTES;
        return wide;
    }

private:
    __device__ __forceinline__ void widen() const {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
            for (int i = 0; i < WARP_KEYS / L::ROWS_APART; ++i) {
                const int r = line + i * L::ROWS_APART;
                const uint4 codes = shared_uint4(ring + read + side * L::SIDE_BYTES + r * HEAD_DIM + chunk * 16);
                const float scale = shared_float(ring + read + 2 * L::SIDE_BYTES + (side * WARP_KEYS + r) * 4);
                const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
                uint32_t packed[8];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float entries[4];
                    int8_entries(words[j], entries);
                    packed[2 * j] = pack<T>(entries[0] * scale, entries[1] * scale);
                    packed[2 * j + 1] = pack<T>(entries[2] * scale, entries[3] * scale);
                }
                const uint32_t row = wide + side * (L::WIDE_BYTES / 2) + r * L::WIDE_ROW;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    store_shared(row + ((2 * chunk + j) ^ (r & 7)) * 16, packed + 4 * j);
                }
            }
        }
    }
    static __device__ __forceinline__ uint4 shared_uint4(uint32_t address) {
        uint4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(address)
                     : "memory");
        return x;
    }
    static __device__ __forceinline__ float shared_float(uint32_t address) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
        return x;
    }
    static __device__ __forceinline__ void store_shared(uint32_t address, const uint32_t* x) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
    }
};

}  // namespace s2o

#define S2O_DECODE_INT8(name, T, HEAD_DIM)                                                                   \
    extern "C" {                                                                                             \
    __constant__ s2o::LaunchInfo name##_launch = {s2o::DECODE_THREADS, s2o::Int8DecodeLayout<HEAD_DIM>::BYTES, \
                                                  s2o::DECODE_BLOCKS_PER_SM, 0, s2o::OVERLAPS};              \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(s2o::DECODE_THREADS, s2o::DECODE_BLOCKS_PER_SM)             \
        name(const __grid_constant__ s2o::Int8SplitParams p) {                                               \
        s2o::overlap();                                                                                      \
        s2o::decode<T, HEAD_DIM, s2o::Int8DecodeRing<T, HEAD_DIM>>(p);                                       \
    }

S2O_DECODE_INT8(s2o_decode_int8_bf16_64, __nv_bfloat16, 64)
S2O_DECODE_INT8(s2o_decode_int8_bf16_128, __nv_bfloat16, 128)
S2O_DECODE_INT8(s2o_decode_int8_f16_64, __half, 64)
S2O_DECODE_INT8(s2o_decode_int8_f16_128, __half, 128)
