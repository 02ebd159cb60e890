// Softcap and ALiBi on the scores of a tile.
#pragma once
#include "flash_params.cuh"
#include "online_softmax.cuh"

namespace s2o {

// Changes the scores of one head. Afterwards a score of 1 has the size `unit`.
struct ScoreModifiers {
    float unit, cap_scale;
    float slope;  // in units

    __device__ __forceinline__ ScoreModifiers(const FlashParams& p, int head)
        : unit(p.softcap > 0.f ? p.softcap : p.softmax_scale),
          cap_scale(p.softcap > 0.f ? p.softmax_scale / p.softcap : 0.f),
          slope(p.slopes != nullptr ? p.slopes[head] / unit : 0.f) {}

    // Caps the scores of a fragment, and subtracts the slope times the distance of row and key. `apart` is the position
    // of the thread's first row less that of its first key (the layout is in online_softmax.cuh). If no row sees a key
    // behind it, a row's share of its distances is left out, which softmax cancels.
    template <int N>
    __device__ __forceinline__ void apply(float (&s)[N], bool no_key_is_behind, int apart) const {
        if (cap_scale > 0.f) {
#pragma unroll
            for (int i = 0; i < N; ++i) s[i] = tanh_approx(s[i] * cap_scale);
        }
        if (slope == 0.f) return;
        if (no_key_is_behind) {
            const float first = -slope * float(apart);
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const float even = fmaf(slope, float(2 * i), first), odd = fmaf(slope, float(2 * i + 1), first);
                s[i] += even;
                s[i + 1] += odd;
                s[i + 2] += even;
                s[i + 3] += odd;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float step = 8 * (i >> 1 & 1) - 8 * (i >> 2) - (i & 1);
                s[i] = fmaf(-slope, fabsf(float(apart) + step), s[i]);
            }
        }
    }
};

// Nothing, for schedules that leave scores as they are.
struct NoModifiers {};

}  // namespace s2o
