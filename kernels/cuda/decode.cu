// Attention of one query per sequence on keys and values in 16 bits (decode.cuh).
#include "decode.cuh"
#include "launch.cuh"

namespace s2o {

template <int HEAD_DIM>
struct DecodeLayout {
    static constexpr int ROW = HEAD_DIM * 2;                   // bytes
    static constexpr int ROW_CHUNKS = HEAD_DIM / 8;            // of 16 bytes
    static constexpr int ROWS_APART = 32 / ROW_CHUNKS;         // ROW_CHUNKS lanes copy a row
    static constexpr int SIDE_BYTES = WARP_KEYS * ROW;         // keys or values of a step
    static constexpr int STAGE_BYTES = 2 * SIDE_BYTES;
    // 24 KiB for each warp, of which two thirds and more are in flight: 64 KiB and more for each block.
    static constexpr int STAGES = 24 * 1024 / STAGE_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int BYTES = DECODE_WARPS * RING_BYTES;
    // One block fits in the 99 KiB of the smallest GPUs, with its states; two in the 227 KiB of an H100.
    static_assert(BYTES + 1024 <= 99 * 1024);
};

// The ring of a warp's keys and values. A slot is filled again one step after it was read.
template <int HEAD_DIM>
class DecodeRing {
    using L = DecodeLayout<HEAD_DIM>;
    const char* rows[2];   // keys and values, from this lane's chunk of its first row on
    int64_t row_bytes[2];
    uint32_t ring;         // address of this lane's chunk in the first slot, without the swizzle
    int line, chunk;
    int key, end;          // this lane's first key of the next load
    bool exists;           // this lane's chunk: heads may be narrower
    int fill = 0, read = 0;  // slots, in bytes

public:
    static constexpr int BYTES = L::RING_BYTES;

    __device__ __forceinline__ DecodeRing(const SplitParams& p, const DecodeItem& item, int first_key,
                                          uint32_t address, int lane)
        : ring(address), line(lane / L::ROW_CHUNKS), chunk(lane % L::ROW_CHUNKS), key(first_key + line),
          end(item.end_key), exists(chunk * 8 < p.attn.head_dim) {
        const AttnParams& attn = p.attn;
        const Strides &ks = attn.k_strides, &vs = attn.v_strides;
        rows[0] = static_cast<const char*>(attn.k) + 2 * (item.batch * ks.batch + item.kv_head * ks.head) + chunk * 16;
        rows[1] = static_cast<const char*>(attn.v) + 2 * (item.batch * vs.batch + item.kv_head * vs.head) + chunk * 16;
        row_bytes[0] = ks.seq * 2;
        row_bytes[1] = vs.seq * 2;
        for (int i = 0; i < L::STAGES - 1; ++i) load();
    }
    // Rows past the end and columns past the head are zeros: whatever memory holds there, times a probability of zero, may be NaN.
    __device__ __forceinline__ void load() {
        if (key - line < end) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const char* src = rows[side] + key * row_bytes[side];
                const uint32_t dst = ring + fill + side * L::SIDE_BYTES;
#pragma unroll
                for (int i = 0; i < WARP_KEYS / L::ROWS_APART; ++i) {
                    const int r = line + i * L::ROWS_APART;
                    cp_async_16(dst + r * L::ROW + ((chunk ^ (r & 7)) << 4), src,
                                exists && key + i * L::ROWS_APART < end);
                    src += L::ROWS_APART * row_bytes[side];
                }
            }
        }
        cp_async_commit();  // also without copies: `next` counts the groups
        key += STEP_KEYS;
        fill = fill == L::RING_BYTES - L::STAGE_BYTES ? 0 : fill + L::STAGE_BYTES;
    }
    // The address of the next step's keys, which its values follow.
    __device__ __forceinline__ uint32_t next() {
        cp_async_wait<L::STAGES - 2>();
        __syncwarp();
        load();
        const uint32_t address = ring + read;
        read = read == L::RING_BYTES - L::STAGE_BYTES ? 0 : read + L::STAGE_BYTES;
        return address;
    }
};

}  // namespace s2o

#define S2O_DECODE(name, T, HEAD_DIM)                                                                        \
    extern "C" {                                                                                             \
    __constant__ s2o::LaunchInfo name##_launch = {s2o::DECODE_THREADS, s2o::DecodeLayout<HEAD_DIM>::BYTES,   \
                                                  s2o::DECODE_BLOCKS_PER_SM, 0, s2o::OVERLAPS};              \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(s2o::DECODE_THREADS, s2o::DECODE_BLOCKS_PER_SM)             \
        name(const __grid_constant__ s2o::SplitParams p) {                                                   \
        s2o::overlap();                                                                                      \
        s2o::decode<T, HEAD_DIM, s2o::DecodeRing<HEAD_DIM>>(p);                                                \
    }

S2O_DECODE(s2o_decode_bf16_64, __nv_bfloat16, 64)
S2O_DECODE(s2o_decode_bf16_128, __nv_bfloat16, 128)
S2O_DECODE(s2o_decode_f16_64, __half, 64)
S2O_DECODE(s2o_decode_f16_128, __half, 128)
