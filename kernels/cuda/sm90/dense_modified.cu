// Dense attention with softcap or ALiBi on sm_90a, causal or not. The portable build has `flash` for it.
#include "engine.cuh"
#include "instantiate.cuh"

namespace s2o {

// The part of a call of `flash` without sequences and windows that dense attention has too.
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
    return attn;
}

struct ModifiedSchedule : DenseSchedule {
    using Params = FlashParams;
    static constexpr bool MODIFIES_SCORES = true;
    __device__ static int num_items(const Params& p) { return DenseSchedule::num_items(attn_of(p)); }
    __device__ static bool decode(const Params& p, int item, WorkItem& w) {
        return DenseSchedule::decode(attn_of(p), item, w);
    }
};

}  // namespace s2o

S2O_KERNELS(s2o_dense_modified, s2o::ModifiedSchedule)
