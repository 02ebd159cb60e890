// Shared by the runners: checked CUDA calls, device memory and random tensors.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../cuda/params.cuh"

#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t e = (call);                                                                  \
        if (e != cudaSuccess) {                                                                  \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e));         \
            exit(2);                                                                             \
        }                                                                                        \
    } while (0)

inline int passed = 0, failed = 0;

// Device memory, at least one element.
template <typename T>
struct Buffer {
    T* data = nullptr;
    int64_t count = 0;
    Buffer() = default;
    explicit Buffer(int64_t count) { make(count); }
    explicit Buffer(const std::vector<T>& host) : Buffer(int64_t(host.size())) {
        CHECK(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
    void make(int64_t n) {
        count = n;
        CHECK(cudaMalloc(&data, std::max<int64_t>(1, n) * sizeof(T)));
    }
    void remake(int64_t n) {
        CHECK(cudaFree(data));
        make(n);
    }
    void fill(int byte) {
        if (count > 0) CHECK(cudaMemset(data, byte, count * sizeof(T)));
    }
    operator T*() const { return data; }
};

template <typename T>
std::vector<T> fetch(const T* device, int64_t count) {
    std::vector<T> host(count);
    CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

// A (batch, len, heads, dim) tensor: layout 0 (B,S,H,D), 1 the same with padded rows, 2 (B,H,S,D).
template <typename T>
struct Tensor : Buffer<T> {
    s2o::Strides strides{};
    void make(int batch, int len, int heads, int dim, int layout) {
        if (layout == 2) {
            strides = {int64_t(len) * dim * heads, dim, int64_t(len) * dim};
        } else {
            strides.head = dim;
            strides.seq = int64_t(heads) * dim + (layout == 1 ? 24 : 0);
            strides.batch = strides.seq * len + (layout == 1 ? 40 : 0);
        }
        Buffer<T>::make(strides.batch * batch);
    }
};

// Pseudo-random bits of a number, and normal values.
__device__ inline uint32_t mix(uint64_t x) {
    x ^= x >> 33; x *= 0xff51afd7ed558ccdull; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ull; x ^= x >> 33;
    return uint32_t(x);
}
__device__ inline float normal(uint64_t i) {
    const float u = (mix(2 * i) + 1.f) * 2.3283064e-10f, w = mix(2 * i + 1) * 2.3283064e-10f;
    return sqrtf(-2.f * logf(u)) * cospif(2.f * w);
}
