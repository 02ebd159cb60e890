// Dense attention with softcap or ALiBi, causal or not.
#pragma once
#include "flash_params.cuh"
#include "schedule.cuh"

namespace s2o {

// The part of a call of `flash` without windows that dense attention has too.
__device__ __forceinline__ AttnParams attn_of(const FlashParams& p) {
    AttnParams attn{};
    attn.q = p.q;
    attn.k = p.k;
    attn.v = p.v;
    attn.out = p.out;
    attn.next_item = p.next_item;
    attn.q_strides = p.q_strides;
    attn.k_strides = p.k_strides;
    attn.v_strides = p.v_strides;
    attn.out_strides = p.out_strides;
    attn.batch = p.batch;
    attn.num_heads = p.num_heads;
    attn.num_kv_heads = p.num_kv_heads;
    attn.q_len = p.q_len;
    attn.k_len = p.k_len;
    attn.causal = p.right == 0;
    attn.heads_per_section = p.heads_per_section;
    attn.softmax_scale = p.softmax_scale;
    attn.head_dim = p.head_dim;
    return attn;
}

struct ModifiedSchedule : DenseSchedule {
    using Params = FlashParams;
    static constexpr bool MODIFIES_SCORES = true;

    __device__ static int num_items(const Params& p) { return DenseSchedule::num_items(attn_of(p)); }
    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        decode_whole(p, attn_of(p), item, w);
        return true;
    }

protected:
    __device__ __forceinline__ static void decode_whole(const Params& p, const AttnParams& attn, int item, WorkItem& w) {
        DenseSchedule::decode(attn, item, w);
        if (!attn.causal) w.position += p.k_len - p.q_len;
    }
};

}  // namespace s2o
