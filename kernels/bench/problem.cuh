// A problem on the device with random tensors and orders, and the launches of every kernel on it.
#pragma once
#include "../cuda/merge.cu"
#ifdef S2O_SM80
#include "../cuda/sm80/block_sparse.cu"
#include "../cuda/sm80/dense.cu"
#include "../cuda/sm80/ladder.cu"
#include "../cuda/sm80/single_pass.cu"
#include "../cuda/sm80/split.cu"
#include "../cuda/sm80/two_pass.cu"
#else
#include "../cuda/sm90/block_sparse.cu"
#include "../cuda/sm90/dense.cu"
#include "../cuda/sm90/ladder.cu"
#include "../cuda/sm90/single_pass.cu"
#include "../cuda/sm90/split.cu"
#include "../cuda/sm90/two_pass.cu"
#endif
#include "device.cuh"
#include "reference.cuh"

// Number of tiles after the triggering tile that the kernel `single_pass` still keeps.
#ifdef S2O_SM80
constexpr int LAG = 0;
#else
constexpr int LAG = 1;
#endif

template <typename T>
__global__ void fill_normal(T* x, int64_t n, uint64_t seed, float std) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        x[i] = T(std * normal(seed + i));
    }
}
// Row n of a (batch, head): identity, or a pseudo-random permutation of the n*S tokens (multiply and xor-shift rounds
// are a bijection of the next power of two; values past the end are mapped again).
__global__ void fill_perm(int32_t* perm, int64_t head_stride, int first_segment, int S, bool random) {
    const int n = first_segment + blockIdx.x, head = blockIdx.y, len = n * S;
    if (len == 0) return;
    int64_t before = 0;
    for (int m = first_segment; m < n; ++m) before += int64_t(m) * S;
    const int bits = 32 - __clz(len - 1);
    const uint32_t mask = (1ull << bits) - 1, key = mix(head * 7919 + n);
    for (int i = threadIdx.x; i < len; i += blockDim.x) {
        uint32_t x = i;
        do {
            for (int round = 0; random && round < 3; ++round) {
                x = (x * (0x9e3779b1u + 2 * key) + key + round) & mask;
                x ^= x >> (bits / 2);
            }
        } while (x >= uint32_t(len));
        perm[head * head_stride + before + i] = x;
    }
}

struct Case {
    int batch, heads, kv_heads, q_len, k_len;
    bool causal;
    int layout;  // 0 (B,S,H,D), 1 the same with padded rows, 2 (B,H,S,D)
};

// A random tensor.
template <typename T>
void make(Tensor<T>& x, int batch, int len, int heads, int dim, int layout, uint64_t seed, float std = 1.f) {
    x.make(batch, len, heads, dim, layout);
    fill_normal<<<1024, 256>>>(x.data, x.count, seed << 39, std);
}

#ifndef S2O_SM80
template <typename T>
CUtensorMap tensor_map(const Tensor<T>& x, int batch, int len, int heads, int dim, int box_rows) {
    static auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult r;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &r));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }();
    CUtensorMap map;
    cuuint64_t dims[4] = {cuuint64_t(dim), cuuint64_t(len), cuuint64_t(heads), cuuint64_t(batch)};
    cuuint64_t strides[3] = {cuuint64_t(x.strides.seq * 2), cuuint64_t(x.strides.head * 2),
                             cuuint64_t(x.strides.batch * 2)};
    cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1}, ones[4] = {1, 1, 1, 1};
    const bool half = std::is_same_v<T, __half>;
    CUresult r = encode(&map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data,
                        dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS) {
        printf("cuTensorMapEncodeTiled: %d\n", int(r));
        exit(2);
    }
    return map;
}
#endif

// Leaves NaN in shared memory, as an earlier kernel may have.
__global__ void poison_shared(int words) {
    extern __shared__ uint32_t anything[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) const_cast<volatile uint32_t*>(anything)[i] = 0xffffffffu;
}

// Calls KERNEL(name) with the kernel of the family for T and D.
#define S2O_PICK(family, CALL)                                                     \
    if constexpr (std::is_same_v<T, __half>) {                                     \
        if constexpr (D == 128) CALL(family##_f16_128); else CALL(family##_f16_64); \
    } else {                                                                       \
        if constexpr (D == 128) CALL(family##_bf16_128); else CALL(family##_bf16_64); \
    }

template <typename T, int D>
struct Problem {
    Case c;
    Tensor<T> q, k, v, out;
    Buffer<float> lse;
    Buffer<int32_t> counter{1}, perm, q_perm, visited;
    Buffer<s2o::RowState> state, partial_state;
    Buffer<float> partial_out;
    int call_segment = 0, call_segments = 0, tiles = 0;
#ifndef S2O_SM80
    CUtensorMap mq, mk, mv;
#endif
    s2o::S2oParams p{};

    Problem(const Case& c, float std = 1.f, int segment_len = 0) : c(c) {
        make(q, c.batch, c.q_len, c.heads, D, c.layout, 1, std);
        make(k, c.batch, c.k_len, c.kv_heads, D, c.layout, 2);
        make(v, c.batch, c.k_len, c.kv_heads, D, c.layout, 3);
        out.make(c.batch, c.q_len, c.heads, D, c.layout);
        lse.make(rows());
#ifndef S2O_SM80
        mq = tensor_map(q, c.batch, c.q_len, c.heads, D, s2o::TILE_Q);
        mk = tensor_map(k, c.batch, c.k_len, c.kv_heads, D, s2o::TILE_K);
        mv = tensor_map(v, c.batch, c.k_len, c.kv_heads, D, s2o::TILE_K);
#endif
        const int64_t kv_bytes = int64_t(c.k_len) * D * 4;
        const int kv_in_l2 = int(std::max<int64_t>(1, (32 << 20) / kv_bytes));
        p.attn = {q.data, k.data, v.data, out.data, lse, counter, q.strides, k.strides, v.strides, out.strides,
                  c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, c.causal,
                  std::min(c.batch * c.heads, kv_in_l2 * (c.heads / c.kv_heads)), 1.f / sqrtf(float(D))};
        const int offset = c.causal ? c.k_len - c.q_len : 0;
        tiles = (offset + c.q_len - 1) / s2o::TILE_Q - offset / s2o::TILE_Q + 1;
        if (!segment_len) return;
        call_segment = offset / segment_len;
        call_segments = (c.k_len - 1) / segment_len - call_segment + 1;
        p.segment_len = segment_len;
        p.ranked_rows = c.q_len;
        segments(call_segment, call_segments);
        perm.make(p.kv_perm_head_stride * c.batch * c.heads);
        visited.make(slots());
        q_perm.make(rows());
        state.make(rows());
        p.kv_perm = perm;
        p.tiles_visited = visited;
        p.q_perm = q_perm;
        p.state = state;
    }
    int64_t rows() const { return int64_t(c.batch) * c.heads * c.q_len; }
    int64_t slots() const { return int64_t(c.batch) * c.heads * call_segments * (p.segment_len / s2o::TILE_Q); }
    void segments(int first, int count) {
        p.first_segment = first;
        p.num_segments = count;
        p.kv_perm_head_stride = 0;
        for (int n = first; n < first + count; ++n) p.kv_perm_head_stride += int64_t(n) * p.segment_len;
    }
    void permute(bool random) {
        fill_perm<<<dim3(p.num_segments, c.batch * c.heads), 256>>>(perm.data, p.kv_perm_head_stride, p.first_segment,
                                                                    p.segment_len, random);
    }
    // One order of all keys per head, in the memory of the segments' orders; needs at least four segments.
    void permute_all(bool random) {
        fill_perm<<<dim3(1, c.batch * c.heads), 256>>>(perm.data, c.k_len, 1, c.k_len, random);
    }
    // Every query against every key in that order, not causal. `asks`: with a stop test that is never true.
    void ladder(bool asks) {
        s2o::S2oParams all = p;
        all.kv_perm_head_stride = c.k_len;
        all.tau = 1e-30f;
#define LAUNCH_ALL(name) launch_with<name##_traits>(name, name##_launch, all)
#ifndef S2O_SM80  // one kernel with and without the test
        if (!asks) { S2O_PICK(s2o_ladder_full, LAUNCH_ALL) return; }
#endif
        S2O_PICK(s2o_ladder, LAUNCH_ALL)
    }
    // Queries of each segment in a pseudo-random order.
    void permute_queries() {
        const int offset = c.k_len - c.q_len;
        std::vector<int32_t> order(rows(), -1);
        for (int64_t head = 0; head < c.batch * c.heads; ++head)
            for (int n = call_segment; n < call_segment + call_segments; ++n) {
                const int begin = std::max(0, n * p.segment_len - offset);
                const int end = std::min(p.ranked_rows, (n + 1) * p.segment_len - offset);
                for (int r = begin; r < end; ++r) order[head * c.q_len + r] = r;
                for (int r = end - 1; r > begin; --r) {
                    const int other = begin + (r * 2654435761u + head) % (r - begin + 1);
                    std::swap(order[head * c.q_len + r], order[head * c.q_len + other]);
                }
            }
        CHECK(cudaMemcpy(q_perm, order.data(), 4 * order.size(), cudaMemcpyHostToDevice));
    }
    void poison() {
        int bytes = 0;
        CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        CHECK(cudaFuncSetAttribute(poison_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        poison_shared<<<1024, 256, bytes>>>(bytes / 4);
        out.fill(0xff);
        lse.fill(0xff);
        visited.fill(0xff);
        state.fill(0xff);
    }
    template <class X, class Kernel, class Params>
    void launch_with(Kernel kernel, const s2o::LaunchInfo& symbol, const Params& params) {
        static s2o::LaunchInfo info{};
        static int sms = 0;
        if (!info.threads) {
            CHECK(cudaMemcpyFromSymbol(&info, symbol, sizeof(info)));
            CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, info.shared_bytes));
            CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        }
        CHECK(cudaMemsetAsync(counter, 0, 4));
#ifdef S2O_SM80
        kernel<<<sms * info.blocks_per_sm, info.threads, info.shared_bytes>>>(params);
#else
        kernel<<<sms * info.blocks_per_sm, info.threads, info.shared_bytes>>>(mq, mk, mv, params);
#endif
        CHECK(cudaGetLastError());
    }
#define LAUNCH_ATTN(name) launch_with<name##_traits>(name, name##_launch, p.attn)
#define LAUNCH_S2O(name) launch_with<name##_traits>(name, name##_launch, p)
#define LAUNCH_BLOCK(name) launch_with<name##_traits>(name, name##_launch, block)
#define LAUNCH_SPLIT(name) launch_with<name##_traits>(name, name##_launch, split)
    void dense() { S2O_PICK(s2o_dense, LAUNCH_ATTN) }
    void single_pass() { S2O_PICK(s2o_single_pass, LAUNCH_S2O) }
#ifdef S2O_SM80  // one kernel for every rule, and for no stop
    void single_pass_full() { single_pass(); }
    void single_pass_exact() { single_pass(); }
#else
    void single_pass_full() { S2O_PICK(s2o_single_pass_full, LAUNCH_S2O) }
    void single_pass_exact() { S2O_PICK(s2o_single_pass_exact, LAUNCH_S2O) }
#endif
    void two_pass() {
        S2O_PICK(s2o_pass1, LAUNCH_S2O)
        S2O_PICK(s2o_pass2, LAUNCH_S2O)
    }
    void blocks(const int32_t* key_blocks, const int64_t* ranges) {
        const s2o::BlockParams block = {p.attn, key_blocks, ranges};
        S2O_PICK(s2o_block, LAUNCH_BLOCK)
    }
    // Rows first_row.., with the keys in `splits` parts.
    void split(int first_row, int splits) {
        const int key_tiles = (c.k_len + s2o::TILE_K - 1) / s2o::TILE_K;
        const int row_tiles = (c.q_len - first_row + s2o::TILE_Q - 1) / s2o::TILE_Q;
        const int64_t part_rows = int64_t(c.batch) * c.heads * row_tiles * splits * s2o::TILE_Q;
        if (partial_state.count != part_rows) {
            partial_out.remake(part_rows * D);
            partial_state.remake(part_rows);
            partial_out.fill(0xff);
        }
        const s2o::SplitParams split = {p.attn, partial_out, partial_state, first_row, splits,
                                        (key_tiles + splits - 1) / splits, D};
        S2O_PICK(s2o_split, LAUNCH_SPLIT)
        const int64_t rows = int64_t(c.batch) * c.heads * (c.q_len - first_row);
        const int warps = s2o::MERGE_THREADS / 32, grid = int((rows + warps - 1) / warps);
        if constexpr (std::is_same_v<T, __half>) s2o_merge_f16<<<grid, s2o::MERGE_THREADS>>>(split);
        else s2o_merge_bf16<<<grid, s2o::MERGE_THREADS>>>(split);
        CHECK(cudaGetLastError());
    }
};
