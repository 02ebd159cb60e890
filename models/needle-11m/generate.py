"""Greedy generation with a cache of keys and values: one prefill per prompt, then all prompts of a group together."""
import json, os
import torch
from model import CFG, Model, post, pre
from pack import load


def load_model(path, dev):
    config = os.path.join(path, "config.json")
    cfg = {k: v for k, v in json.load(open(config)).items() if k in CFG} if os.path.exists(config) else CFG
    model = Model(dict(CFG) | cfg).to(dev)
    return model.load_hf({k: v.to(dev) for k, v in load(path).items()})


def attend(q, k, v, lengths):
    """one query per prompt, q [B, nh, hd]; k, v [B, nkv, T, hd], of which the first lengths[b] are valid"""
    B, nh, hd = q.shape
    s = (q.view(B, k.shape[1], -1, hd) @ k.mT).float() / hd ** 0.5
    late = torch.arange(k.shape[2], device=q.device)[None] >= lengths[:, None]
    p = s.masked_fill(late[:, None, None], float("-inf")).softmax(-1)
    return (p.to(v.dtype) @ v).reshape(B, nh * hd)


@torch.no_grad()
def generate(model, prompts, most, dtype, ends):
    """prompts: lists of ids. Token lists of at most `most` tokens; it ends early if every answer has a token of `ends`
    (a bool tensor over the vocabulary)."""
    c, dev = model.cfg, model.emb.device
    nh, nkv, hd = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    layers = c["num_hidden_layers"]
    B, T = len(prompts), max(map(len, prompts)) + most
    T = min(T, c["max_position_embeddings"])
    keys = torch.zeros(layers, B, nkv, T, hd, device=dev, dtype=dtype)
    values = torch.zeros_like(keys)
    first = []
    for b, ids in enumerate(prompts):
        def keep(i, q, k, v):
            keys[i, b, :, :len(ids)], values[i, b, :, :len(ids)] = k[0], v[0]
        x = torch.tensor(ids, device=dev)[None]
        h = model.hidden(x, torch.arange(len(ids), device=dev)[None], dtype, hook=keep)
        first.append(model.logits(h[-1:]).argmax(-1))
    token = torch.cat(first)
    lengths = torch.tensor([len(p) for p in prompts], device=dev)
    ct, st = model.rope_tables(dev)
    rows, out, done = torch.arange(B, device=dev), [token], ends[token]
    for step in range(most - 1):
        if bool(done.all()) or int(lengths.max()) >= T:
            break
        x = model.emb[token].to(dtype)
        for i, l in enumerate(model.layers):
            q, k, v = pre(x, l.ln1, l.wq, l.wk, l.wv, l.qn, l.kn, ct, st, lengths, nh, nkv, hd)
            keys[i, rows, :, lengths], values[i, rows, :, lengths] = k, v
            x = post(x, attend(q, keys[i], values[i], lengths + 1), l.wo, l.ln2, l.wg, l.wu, l.wd)
        token = model.logits(x).argmax(-1)
        lengths = lengths + 1
        out.append(token)
        done |= ends[token]
    return torch.stack(out, 1).tolist()
