// Checks the sm_90a kernels against reference.cuh, then times them. Build and use:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -o runner kernels/bench/runner.cu
//   runner [check|small|time|all] [longest]      `small` is for compute-sanitizer
// Timing is refused when a check fails. Times are medians of CUDA-event timings, one launch each, on random data.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../cuda/dense.cu"
#include "../cuda/sparse.cu"
#include "reference.cuh"

#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t e = (call);                                                                  \
        if (e != cudaSuccess) {                                                                  \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e));         \
            exit(2);                                                                             \
        }                                                                                        \
    } while (0)

using reference::Strided;

__device__ uint32_t mix(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdull; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ull; x ^= x >> 33;
    return uint32_t(x);
}
template <typename T>
__global__ void fill_normal(T* x, int64_t n, uint64_t seed, float std) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const float u = (mix(seed + 2 * i) + 1.f) * 2.3283064e-10f, w = mix(seed + 2 * i + 1) * 2.3283064e-10f;
        x[i] = T(std * sqrtf(-2.f * logf(u)) * cospif(2.f * w));
    }
}
// Row n of a (batch, head): identity, or a pseudo-random permutation of the n*S tokens (multiply and xor-shift rounds are
// a bijection of the next power of two; values past the end walk on).
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

template <typename T>
struct Tensor {
    T* data = nullptr;
    int64_t count = 0, sb = 0, ss = 0, sh = 0;
    void make(int batch, int len, int heads, int dim, int layout) {
        if (layout == 2) { ss = dim; sh = int64_t(len) * dim; sb = sh * heads; }
        else { sh = dim; ss = int64_t(heads) * dim + (layout == 1 ? 24 : 0); sb = ss * len + (layout == 1 ? 40 : 0); }
        count = sb * batch;
        CHECK(cudaMalloc(&data, count * sizeof(T)));
    }
    void random(uint64_t seed, float std = 1.f) { fill_normal<<<1024, 256>>>(data, count, seed << 40, std); }
    Strided strided() const { return {data, sb, ss, sh}; }
    ~Tensor() { cudaFree(data); }
};

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
    cuuint64_t strides[3] = {cuuint64_t(x.ss * 2), cuuint64_t(x.sh * 2), cuuint64_t(x.sb * 2)};
    cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1}, ones[4] = {1, 1, 1, 1};
    CUresult r = encode(&map, std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        4, x.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS) { printf("cuTensorMapEncodeTiled: %d\n", int(r)); exit(2); }
    return map;
}

template <typename T, int D>
struct Problem {
    Case c;
    Tensor<T> q, k, v, out;
    float* lse = nullptr;
    int32_t *counter = nullptr, *perm = nullptr, *visited = nullptr;
    int64_t perm_head_stride = 0;
    int first_segment = 0, segments = 0, tiles = 0;
    CUtensorMap mq, mk, mv;
    s2o::SparseParams p{};

    Problem(const Case& c, float std = 1.f, int segment_len = 0) : c(c) {
        q.make(c.batch, c.q_len, c.heads, D, c.layout); q.random(1, std);
        k.make(c.batch, c.k_len, c.kv_heads, D, c.layout); k.random(2, 1.f);
        v.make(c.batch, c.k_len, c.kv_heads, D, c.layout); v.random(3, 1.f);
        out.make(c.batch, c.q_len, c.heads, D, c.layout);
        CHECK(cudaMalloc(&lse, sizeof(float) * c.batch * c.heads * c.q_len));
        CHECK(cudaMalloc(&counter, 4));
        mq = tensor_map(q, c.batch, c.q_len, c.heads, D, s2o::TILE_Q);
        mk = tensor_map(k, c.batch, c.k_len, c.kv_heads, D, s2o::TILE_K);
        mv = tensor_map(v, c.batch, c.k_len, c.kv_heads, D, s2o::TILE_K);
        const int64_t kv_bytes = int64_t(c.k_len) * D * 4;
        const int kv_in_l2 = int(std::max<int64_t>(1, (32 << 20) / kv_bytes));
        auto& d = p.dense;
        d = {out.data, lse, counter, out.sb, out.ss, out.sh, c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, c.causal,
             std::min(c.batch * c.heads, kv_in_l2 * (c.heads / c.kv_heads)), 1.f / sqrtf(float(D))};
        p.k = k.data; p.v = v.data;
        p.k_batch_stride = k.sb; p.k_seq_stride = k.ss; p.k_head_stride = k.sh;
        p.v_batch_stride = v.sb; p.v_seq_stride = v.ss; p.v_head_stride = v.sh;
        const int offset = c.causal ? c.k_len - c.q_len : 0;
        tiles = (offset + c.q_len - 1) / s2o::TILE_Q - offset / s2o::TILE_Q + 1;
        if (segment_len) {
            p.segment_len = segment_len;
            first_segment = offset / segment_len;
            segments = (c.k_len - 1) / segment_len - first_segment + 1;
            for (int n = first_segment; n < first_segment + segments; ++n) perm_head_stride += int64_t(n) * segment_len;
            p.kv_perm_head_stride = perm_head_stride;
            CHECK(cudaMalloc(&perm, 4 * std::max<int64_t>(1, perm_head_stride * c.batch * c.heads)));
            CHECK(cudaMalloc(&visited, 4 * int64_t(c.batch) * c.heads * tiles));
            p.kv_perm = perm; p.tiles_visited = visited;
        }
    }
    ~Problem() { cudaFree(lse); cudaFree(counter); cudaFree(perm); cudaFree(visited); }

    void permute(bool random) {
        fill_perm<<<dim3(segments, c.batch * c.heads), 256>>>(perm, perm_head_stride, first_segment, p.segment_len, random);
    }
    void poison() {
        CHECK(cudaMemset(out.data, 0xff, out.count * sizeof(T)));
        CHECK(cudaMemset(lse, 0xff, sizeof(float) * c.batch * c.heads * c.q_len));
    }
    template <class X, class Kernel, class Params>
    void launch_with(Kernel kernel, const Params& params) {
        static bool ready = false;
        static int sms = 0;
        if (!ready) {
            CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, X::SHARED_BYTES));
            CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
            ready = true;
        }
        CHECK(cudaMemsetAsync(counter, 0, 4));
        kernel<<<sms, s2o::THREADS, X::SHARED_BYTES>>>(mq, mk, mv, params);
        CHECK(cudaGetLastError());
    }
    void dense() {
        if constexpr (std::is_same_v<T, __half>) {
            if constexpr (D == 128) launch_with<s2o_dense_f16_128_traits>(s2o_dense_f16_128, p.dense);
            else launch_with<s2o_dense_f16_64_traits>(s2o_dense_f16_64, p.dense);
        } else {
            if constexpr (D == 128) launch_with<s2o_dense_bf16_128_traits>(s2o_dense_bf16_128, p.dense);
            else launch_with<s2o_dense_bf16_64_traits>(s2o_dense_bf16_64, p.dense);
        }
    }
    void sparse_full() {
        if constexpr (std::is_same_v<T, __nv_bfloat16> && D == 128) launch_with<s2o_sparse_full_bf16_128_traits>(s2o_sparse_full_bf16_128, p);
    }
    void sparse_stop(float tau) {
        p.tau = tau;
        if constexpr (std::is_same_v<T, __half>) launch_with<s2o_sparse_stop_f16_128_traits>(s2o_sparse_stop_f16_128, p);
        else if constexpr (D == 128) launch_with<s2o_sparse_stop_bf16_128_traits>(s2o_sparse_stop_bf16_128, p);
        else launch_with<s2o_sparse_stop_bf16_64_traits>(s2o_sparse_stop_bf16_64, p);
    }
    double flops() const {
        const double pairs = c.causal ? c.q_len * (c.k_len - (c.q_len - 1) / 2.0) : double(c.q_len) * c.k_len;
        return 4.0 * D * pairs * c.batch * c.heads;
    }
};

int passed = 0, failed = 0;

// Relative Frobenius error of the rows the reference has (every row_step-th), NaN counts as failure; lse absolute.
template <typename T, int D>
void compare(const char* what, Problem<T, D>& pr, const float* ref, const float* ref_lse, int rows, int row_step) {
    const Case& c = pr.c;
    std::vector<T> out(pr.out.count);
    std::vector<float> want(int64_t(c.batch) * rows * c.heads * D), lse(int64_t(c.batch) * c.heads * c.q_len), want_lse;
    CHECK(cudaMemcpy(out.data(), pr.out.data, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(want.data(), ref, want.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse.data(), pr.lse, lse.size() * 4, cudaMemcpyDeviceToHost));
    double diff = 0, norm = 0, worst_row = 0, lse_err = 0;
    if (ref_lse) {
        want_lse.resize(int64_t(c.batch) * c.heads * rows);
        CHECK(cudaMemcpy(want_lse.data(), ref_lse, want_lse.size() * 4, cudaMemcpyDeviceToHost));
    }
    for (int b = 0; b < c.batch; ++b)
        for (int r = 0; r < rows; ++r)
            for (int h = 0; h < c.heads; ++h) {
                const int row = std::min(r * row_step, c.q_len - 1);
                double rd = 0, rn = 0;
                for (int d = 0; d < D; ++d) {
                    const double x = float(out[b * pr.out.sb + row * pr.out.ss + h * pr.out.sh + d]);
                    const double y = want[((int64_t(b) * rows + r) * c.heads + h) * D + d];
                    rd += (x - y) * (x - y);
                    rn += y * y;
                }
                diff += rd; norm += rn;
                if (!(rd / rn <= worst_row)) worst_row = rd / rn;
                if (ref_lse) {
                    const double e = fabs(lse[(int64_t(b) * c.heads + h) * c.q_len + row] - want_lse[(int64_t(b) * c.heads + h) * rows + r]);
                    if (!(e <= lse_err)) lse_err = e;
                }
            }
    const double rel = sqrt(diff / norm), worst = sqrt(worst_row);
    const bool ok = rel < 5e-3 && worst < 2e-2 && lse_err < 2e-3;
    ok ? ++passed : ++failed;
    if (!ok || getenv("VERBOSE"))
        printf("%s %s b%d h%d/%d q%d k%d causal%d layout%d D%d: rel %.2e worst row %.2e lse %.2e\n", ok ? "ok  " : "FAIL",
               what, c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, c.layout, D, rel, worst, lse_err);
}

// A second launch gives the same bits.
template <typename T, int D, class F>
void check_repeatable(const char* what, Problem<T, D>& pr, F launch) {
    std::vector<T> first(pr.out.count), second(pr.out.count);
    CHECK(cudaMemcpy(first.data(), pr.out.data, first.size() * sizeof(T), cudaMemcpyDeviceToHost));
    pr.poison();
    launch();
    CHECK(cudaMemcpy(second.data(), pr.out.data, second.size() * sizeof(T), cudaMemcpyDeviceToHost));
    const bool same = !memcmp(first.data(), second.data(), first.size() * sizeof(T));
    same ? ++passed : ++failed;
    if (!same) printf("FAIL %s: two launches differ\n", what);
}

template <typename T, int D>
void check_dense(const Case& c, float std = 1.f) {
    Problem<T, D> pr(c, std);
    const int row_step = c.q_len > 4096 ? c.q_len / 61 : 1, rows = (c.q_len + row_step - 1) / row_step;
    float *ref, *ref_lse;
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * rows * c.heads * D));
    CHECK(cudaMalloc(&ref_lse, 4 * int64_t(c.batch) * rows * c.heads));
    reference::dense<T, D><<<dim3(rows, c.heads, c.batch), 32>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(), ref, ref_lse,
        c.heads, c.kv_heads, c.q_len, c.k_len, c.causal, pr.p.dense.softmax_scale, rows, row_step);
    pr.poison();
    pr.dense();
    CHECK(cudaDeviceSynchronize());
    compare("dense", pr, ref, ref_lse, rows, row_step);
    if (c.q_len > 4096) check_repeatable("dense", pr, [&] { pr.dense(); });
    cudaFree(ref); cudaFree(ref_lse);
}

template <typename T, int D>
void check_sparse(const Case& c, int segment_len, float std, std::vector<float> taus) {
    Problem<T, D> pr(c, std, segment_len);
    const int64_t n = int64_t(c.batch) * c.heads * pr.tiles;
    float* ref;
    int32_t* ref_visited;
    CHECK(cudaMalloc(&ref, 4 * int64_t(c.batch) * c.q_len * c.heads * D));
    CHECK(cudaMalloc(&ref_visited, 4 * n));
    for (int random = 0; random < 2; ++random) {
        pr.permute(random);
        for (float tau : taus) {
            reference::sparse<T, D><<<dim3(pr.tiles, c.heads, c.batch), s2o::TILE_Q>>>(pr.q.strided(), pr.k.strided(), pr.v.strided(),
                pr.perm, pr.perm_head_stride, ref, ref_visited, c.heads, c.kv_heads, c.q_len, c.k_len, segment_len, tau, pr.p.dense.softmax_scale);
            CHECK(cudaGetLastError());
            pr.poison();
            CHECK(cudaMemset(pr.visited, 0xff, 4 * n));
            tau < 0 ? pr.sparse_full() : pr.sparse_stop(tau);
            CHECK(cudaDeviceSynchronize());
            std::vector<int32_t> a(n), b(n);
            CHECK(cudaMemcpy(a.data(), pr.visited, 4 * n, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(b.data(), ref_visited, 4 * n, cudaMemcpyDeviceToHost));
            int64_t differ = 0, sum = 0, want = 0;
            for (int64_t i = 0; i < n; ++i) { differ += a[i] != b[i]; sum += a[i]; want += b[i]; }
            if (differ || getenv("VERBOSE")) printf("  tau %g: tiles visited %ld, reference %ld, items that differ %ld of %ld\n", tau, long(sum), long(want), long(differ), long(n));
            if (tau > 0) check_repeatable("sparse stop", pr, [&] { pr.sparse_stop(tau); });
            compare(tau < 0 ? "sparse full" : "sparse stop", pr, ref, nullptr, c.q_len, 1);
        }
    }
    cudaFree(ref); cudaFree(ref_visited);
}

void checks(bool small) {
    using B = __nv_bfloat16;
    if (small) {
        check_dense<B, 128>({1, 2, 1, 300, 300, true, 0});
        check_dense<B, 128>({2, 2, 2, 77, 333, true, 1});
        check_dense<__half, 64>({1, 1, 1, 130, 200, false, 2});
        check_sparse<B, 128>({1, 2, 1, 600, 600, true, 0}, 256, 1.f, {-1.f, 0.f, 0.3f});
        return;
    }
    for (int len : {1, 2, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 384, 500, 640, 777, 1000})
        for (int causal = 0; causal < 2; ++causal) {
            check_dense<B, 128>({1, 4, 4, len, len, bool(causal), 0});
            check_dense<B, 128>({2, 8, 2, len, len, bool(causal), 1});
            check_dense<B, 128>({1, 8, 1, (len + 2) / 3, len, bool(causal), 2});
            check_dense<__half, 128>({2, 4, 1, 1, len, bool(causal), 0});
            check_dense<B, 64>({2, 4, 2, (len + 1) / 2, len, bool(causal), 1});
            check_dense<__half, 64>({1, 4, 4, len, len, bool(causal), 2});
        }
    check_dense<B, 128>({1, 8, 2, 4000, 4000, true, 0}, 4.f);  // peaked scores: large rescales
    check_dense<B, 128>({1, 40, 8, 1500, 3001, true, 0});
    check_dense<B, 128>({1, 32, 8, 32768, 32768, true, 0});
    printf("dense: %d passed, %d failed\n", passed, failed);
    check_sparse<B, 128>({1, 4, 2, 1280, 1280, true, 0}, 256, 1.f, {-1.f, 0.f, .2f, .5f});
    check_sparse<B, 128>({2, 4, 1, 1000, 1000, true, 1}, 128, 2.f, {-1.f, 0.f, .1f, .3f});
    check_sparse<B, 128>({1, 8, 2, 555, 1777, true, 2}, 512, 1.f, {-1.f, 0.f, .1f, .2f});
    check_sparse<B, 64>({1, 2, 2, 1500, 1500, true, 0}, 256, 1.f, {0.f, .2f});
    check_sparse<__half, 128>({1, 2, 2, 1500, 1500, true, 0}, 256, 1.f, {0.f, .2f});
    check_sparse<B, 128>({1, 4, 2, 2048, 2048, true, 0}, 128, .5f, {.1f, .2f});
    check_sparse<B, 128>({1, 16, 4, 4096, 4096, true, 0}, 512, 3.f, {0.f, .02f, .1f});
}

template <class F>
double median_ms(F launch, int runs) {
    cudaEvent_t a, b;
    cudaEventCreate(&a); cudaEventCreate(&b);
    std::vector<float> ms(runs);
    launch(); launch();
    for (auto& m : ms) {
        cudaEventRecord(a); launch(); cudaEventRecord(b);
        CHECK(cudaEventSynchronize(b));
        cudaEventElapsedTime(&m, a, b);
    }
    std::sort(ms.begin(), ms.end());
    return ms[runs / 2];
}

void times(int longest) {
    using B = __nv_bfloat16;
    auto runs = [](int len) { return len >= 131072 ? 5 : len >= 65536 ? 9 : 25; };
    for (int len : {8192, 32768, 65536, 131072}) {
        if (len > longest) break;
        Problem<B, 128> pr({1, 32, 8, len, len, true, 0}, 1.f, 2048);
        const double ms = median_ms([&] { pr.dense(); }, runs(len));
        printf("A dense causal           L=%6d  %9.3f ms  %6.1f TF/s\n", len, ms, pr.flops() / ms * 1e-9);
        for (int random = 0; random < 2; ++random) {
            pr.permute(random);
            const double full = median_ms([&] { pr.sparse_full(); }, runs(len));
            printf("%s  L=%6d  %9.3f ms  %6.1f TF/s  x%.3f of A\n", random ? "C gather, random        " : "B gather, identity      ", len, full, pr.flops() / full * 1e-9, full / ms);
        }
        const double stop = median_ms([&] { pr.sparse_stop(0.f); }, runs(len));
        printf("D random, stop voted     L=%6d  %9.3f ms  %6.1f TF/s  x%.3f of A\n", len, stop, pr.flops() / stop * 1e-9, stop / ms);
    }
    {
        // Every prefix tile is random here, so the vote decides by tau alone: how fast the machinery skips.
        const int len = longest;
        Problem<B, 128> pr({1, 32, 8, len, len, true, 0}, 1.f, 2048);
        pr.permute(true);
        for (float tau : {.02f, .05f, .1f}) {
            const double ms = median_ms([&] { pr.sparse_stop(tau); }, runs(len));
            std::vector<int32_t> visited(int64_t(32) * pr.tiles);
            CHECK(cudaMemcpy(visited.data(), pr.visited, 4 * visited.size(), cudaMemcpyDeviceToHost));
            double sum = 0;
            for (int x : visited) sum += x;
            const double density = sum / (32.0 * pr.tiles * (pr.tiles + 1) / 2);
            printf("E random, tau %.2f        L=%6d  %9.3f ms  density %.4f  %6.1f TF/s of visited tiles\n", tau, len, ms, density, sum * 4 * 128 * 128 * 128 / ms * 1e-9);
        }
    }
    {
        Problem<B, 128> pr({1, 32, 8, 16384, 16384, false, 0});
        for (int heads : {4, 32}) {
            pr.p.dense.heads_per_section = heads;
            const double ms = median_ms([&] { pr.dense(); }, 15);
            printf("A dense non-causal       L= 16384  %9.3f ms  %6.1f TF/s  (%d heads a section)\n", ms, pr.flops() / ms * 1e-9, heads);
        }
        Problem<B, 64> p64({1, 32, 8, 32768, 32768, true, 0});
        const double m64 = median_ms([&] { p64.dense(); }, 15);
        printf("A dense causal D=64      L= 32768  %9.3f ms  %6.1f TF/s\n", m64, p64.flops() / m64 * 1e-9);
    }
}

int main(int argc, char** argv) {
    const char* mode = argc > 1 ? argv[1] : "all";
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (strcmp(mode, "time")) {
        checks(!strcmp(mode, "small"));
        CHECK(cudaDeviceSynchronize());
        printf("%d passed, %d failed\n", passed, failed);
        if (failed && !getenv("TIME_ANYWAY")) return 1;
    }
    if (!strcmp(mode, "time") || !strcmp(mode, "all")) times(argc > 2 ? atoi(argv[2]) : 131072);
    return 0;
}
