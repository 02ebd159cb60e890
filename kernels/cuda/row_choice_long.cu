// Top-p or top-k of rows too long for the registers of a block: one launch per digit of the threshold, which sums the
// weights of the entries by digit value, and one launch that writes the mask. Many blocks share a row. Weights are
// summed as integers, so their order does not matter.
#include "launch.cuh"
#include "row_entries.cuh"

namespace s2o {

constexpr int LONG_CHUNK = 16384;  // entries per block; mirrored on the host
constexpr int BITS_AFTER_FIRST = 20;  // bits below the first digit
constexpr int BITS_AFTER_SECOND = 10;

// A score is fraction * 2^(exponent - 150).
__device__ __forceinline__ int exponent_of(uint32_t bits) { return max(int(bits >> 23), 1); }

__device__ __forceinline__ uint32_t fraction_of(uint32_t bits) {
    return bits >> 23 == 0 ? bits : (bits & 0x7fffff) | 0x800000;
}

// The bin in which this pass counts an entry, or -1.
__device__ __forceinline__ int bin_of(int pass, uint32_t bits, bool first, uint32_t leading) {
    if (first) return pass == 0 ? DIGIT_BINS + int(bits >> 23) : -1;
    if (pass == 0) return int(bits >> BITS_AFTER_FIRST);
    if (pass == 1) return bits >> BITS_AFTER_FIRST == leading ? int(bits >> BITS_AFTER_SECOND & 1023) : -1;
    return bits >> BITS_AFTER_SECOND == leading ? int(bits & 1023) : -1;
}

__device__ __forceinline__ double weight_of(unsigned long long sum, int exponent, bool counts) {
    return counts ? double(sum) : ldexp(double(sum), exponent - 150);
}

// The sum of `x` over this thread and all later threads of the block.
__device__ __forceinline__ double sum_from_here(double x) {
    __shared__ double sums[2][ROW_THREADS];
    int at = 0;
    __syncthreads();
    sums[0][threadIdx.x] = x;
    for (int step = 1; step < ROW_THREADS; step *= 2) {
        __syncthreads();
        double sum = sums[at][threadIdx.x];
        if (threadIdx.x + step < ROW_THREADS) sum += sums[at][threadIdx.x + step];
        at ^= 1;
        sums[at][threadIdx.x] = sum;
    }
    __syncthreads();
    return sums[at][threadIdx.x];
}

// Finds one more digit of the threshold. The last block of a row calls it, after a fence.
__device__ __forceinline__ void find_digit(const RowParams& p, RowThreshold& state, int row) {
    __shared__ int digit;
    __shared__ double others, forced;
    const int bins = p.pass == 0 ? DIGIT_BINS : 1024, of_thread = bins / ROW_THREADS;
    const bool counts = p.counts != nullptr;
    const uint32_t leading = p.pass == 0 ? 0 : __ldcg(&state.leading);
    // Bits of the lowest score of a bin.
    auto bits_of = [&](int bin) {
        if (p.pass == 0) return uint32_t(bin) << BITS_AFTER_FIRST;
        return p.pass == 1 ? leading << BITS_AFTER_FIRST | uint32_t(bin) << BITS_AFTER_SECOND
                           : leading << BITS_AFTER_SECOND | uint32_t(bin);
    };
    auto weight = [&](int bin) { return weight_of(__ldcg(&state.bins[bin]), exponent_of(bits_of(bin)), counts); };

    double own = 0.;
    const int first = threadIdx.x * of_thread;
    for (int bin = first + of_thread - 1; bin >= first; --bin) own += weight(bin);
    const double from_here = sum_from_here(own);
    if (threadIdx.x == 0) others = from_here;
    if (p.pass == 0) {
        double own_forced = 0.;
        for (int exponent = threadIdx.x; exponent < EXPONENT_BINS; exponent += ROW_THREADS) {
            own_forced += weight_of(__ldcg(&state.bins[DIGIT_BINS + exponent]), max(exponent, 1), counts);
        }
        const double all = sum_from_here(own_forced);
        if (threadIdx.x == 0) forced = all;
    }
    if (threadIdx.x == 0) digit = -1;
    __syncthreads();
    double wanted, above;
    if (p.pass == 0) {
        above = 0.;
        wanted = counts ? double(p.counts[row]) - forced
                        : others - (others + forced) * double(p.left_out[entry_of(p.left_out_of, row)]);
        if (p.enabled && p.enabled[entry_of(p.enabled_of, row)] == 0) wanted = 0.;
    } else {
        wanted = __ldcg(&state.wanted);
        above = __ldcg(&state.above);
    }
    // The largest digit whose entries, with the entries above it, reach `wanted`.
    double before = above + (from_here - own), own_above = 0.;
    int own_digit = -1;
    for (int bin = first + of_thread - 1; bin >= first && own_digit < 0; --bin) {
        const double with = before + weight(bin);
        if (with >= wanted) {
            own_digit = bin;
            own_above = before;
        }
        before = with;
    }
    if (own_digit >= 0) atomicMax(&digit, own_digit);
    __syncthreads();
    for (int bin = threadIdx.x; bin < DIGIT_BINS + EXPONENT_BINS; bin += ROW_THREADS) state.bins[bin] = 0;
    if (threadIdx.x == 0) {
        state.arrivals = 0;
        state.found = p.pass == 2;
        if (p.pass == 0) state.wanted = wanted;
        if (p.pass == 0 && (!(wanted > 0.) || digit < 0)) {
            // The forced entries are enough, or all entries together are not.
            state.threshold = wanted > 0. ? 0.f : INFINITY;
            state.found = 1;
        }
    }
    // Rounding may leave the bins of a digit short of `wanted`: the lowest bin is then the threshold.
    const bool here = digit < 0 ? threadIdx.x == 0 : digit == own_digit;
    if (here) {
        const uint32_t bits = bits_of(max(digit, 0));
        state.leading = p.pass == 0 ? bits >> BITS_AFTER_FIRST : p.pass == 1 ? bits >> BITS_AFTER_SECOND : bits;
        state.above = digit < 0 ? before : own_above;
        if (p.pass == 2) state.threshold = __uint_as_float(bits);
    }
}

// Sums the entries of a chunk by digit value.
__device__ __forceinline__ void add_digits(const RowParams& p, const ScoreRow& row, RowThreshold& state, int row_number,
                                           int begin, int chunks) {
    // Sums of the two 12-bit halves of the fractions: 16384 halves fit in 32 bits.
    __shared__ uint32_t low[DIGIT_BINS + EXPONENT_BINS], high[DIGIT_BINS + EXPONENT_BINS];
    __shared__ bool last;
    const bool counts = p.counts != nullptr;
    const uint32_t leading = state.leading;
    for (int bin = threadIdx.x; bin < DIGIT_BINS + EXPONENT_BINS; bin += ROW_THREADS) low[bin] = high[bin] = 0;
    __syncthreads();
    for (int at = begin + threadIdx.x * ROW_VECTOR; at < min(begin + LONG_CHUNK, row.seen);
         at += ROW_THREADS * ROW_VECTOR) {
        const RowVector entries(row, at, true);
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) {
            // Zeros weigh nothing, and zeros that are not forced are counted last.
            const bool first = p.forced_count_first && entries.forced[j], zero = !(entries.score[j] > 0.f);
            if (!entries.scored[j] || (zero && !(first && counts))) continue;
            const uint32_t bits = zero ? 0 : __float_as_uint(entries.score[j]);
            const int bin = bin_of(p.pass, bits, first, leading);
            if (bin < 0) continue;
            atomicAdd(&low[bin], counts ? 1u : fraction_of(bits) & 0xfff);
            if (!counts) atomicAdd(&high[bin], fraction_of(bits) >> 12);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < DIGIT_BINS + EXPONENT_BINS; bin += ROW_THREADS) {
        const unsigned long long sum = (static_cast<unsigned long long>(high[bin]) << 12) + low[bin];
        if (sum != 0) atomicAdd(&state.bins[bin], sum);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&state.arrivals, 1u) + 1 == uint32_t(chunks);
    __syncthreads();
    if (!last) return;
    __threadfence();
    find_digit(p, state, row_number);
}

// One block per chunk of each row.
__device__ __forceinline__ void row_choice_long(const RowParams& p) {
    const int chunks = (p.row_len + LONG_CHUNK - 1) / LONG_CHUNK;
    const int row_number = p.first_row + blockIdx.x / chunks;
    const int begin = int(blockIdx.x % chunks) * LONG_CHUNK;
    const ScoreRow row(p, row_number);
    RowThreshold& state = p.thresholds[blockIdx.x / chunks];
    if (p.pass < 3) {
        if (row.select_all || (p.pass > 0 && state.found)) return;
        return add_digits(p, row, state, row_number, begin, chunks);
    }
    // Zeros are chosen only if entries are counted.
    const float threshold = row.select_all ? INFINITY
                            : p.counts     ? state.threshold
                                           : fmaxf(state.threshold, __uint_as_float(1));
    for (int at = begin + threadIdx.x * ROW_VECTOR; at < min(begin + LONG_CHUNK, p.row_len);
         at += ROW_THREADS * ROW_VECTOR) {
        const RowVector entries(row, at, !row.select_all);
        uint8_t chosen[ROW_VECTOR];
#pragma unroll
        for (int j = 0; j < ROW_VECTOR; ++j) {
            const bool forced = entries.forced[j] || (entries.seen[j] && (row.select_all || !entries.scored[j]));
            chosen[j] = forced || (entries.scored[j] && entries.score[j] >= threshold);
        }
        store_choice(p, row_number, at, chosen);
    }
}

}  // namespace s2o

extern "C" {
__constant__ s2o::LaunchInfo s2o_row_choice_long_launch = {s2o::ROW_THREADS, 0, 0, 0};
__global__ void __launch_bounds__(s2o::ROW_THREADS) s2o_row_choice_long(const __grid_constant__ s2o::RowParams p) {
    s2o::row_choice_long(p);
}
}
