"""The model in PyTorch (Qwen3 architecture), its loss, its 8-bit weights, and the names of Hugging Face."""
import torch
import torch.nn.functional as F
from torch import nn

CFG = dict(vocab_size=4096, hidden_size=256, num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=2,
           head_dim=128, intermediate_size=768, rope_theta=1e6, max_position_embeddings=131072, rms_norm_eps=1e-6)
BOS, EOS = 0, 1
LEVELS = 63                                 # quantised weights are the integers from -LEVELS to LEVELS
GAIN = 1.4                                  # first gains of the query and key norms: sharp heads from the start
MATRICES = ("wq", "wk", "wv", "wo", "wg", "wu", "wd")


def rms(x, w, eps=1e-6):
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


def rope(x, cos, sin):                      # x [N, h, d]; cos, sin [N, d/2]
    h = x.shape[-1] // 2
    a, b = x[..., :h].float(), x[..., h:].float()
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def pre(x, ln, wq, wk, wv, qn, kn, ct, st, pos, nh, nkv, hd):
    n, dt = x.shape[0], x.dtype
    y = rms(x, ln) @ torch.cat([wq, wk, wv]).to(dt).t()
    q, k, v = y.split([nh * hd, nkv * hd, nkv * hd], -1)
    cos, sin = ct[pos], st[pos]
    q = rope(rms(q.reshape(n, nh, hd), qn), cos, sin)
    k = rope(rms(k.reshape(n, nkv, hd), kn), cos, sin)
    return q, k, v.reshape(n, nkv, hd)


def post(x, a, wo, ln, wg, wu, wd):
    dt = x.dtype
    x = x + a @ wo.to(dt).t()
    g, u = (rms(x, ln) @ torch.cat([wg, wu]).to(dt).t()).chunk(2, -1)
    return x + (F.silu(g) * u) @ wd.to(dt).t()


def loss_parts(x, ln, emb, y, m):
    """sums over the targets of text (m 1) and of answers (m 2, and m 3 with a quarter of the weight); and per target
    whether the arg-max is right"""
    lg = (rms(x, ln) @ emb.to(x.dtype).t()).float()
    lse = torch.logsumexp(lg, -1)
    t = lg.gather(-1, y[:, None])[:, 0]
    ce = lse - t
    hit = (t >= lg.amax(-1)).float()
    m1, m2 = (m == 1).float(), (m == 2).float() + 0.25 * (m == 3).float()
    return torch.stack([(ce * m1).sum(), m1.sum(), (ce * m2).sum(), m2.sum()]), hit


def spread(q, k, rows):
    """mean entropy (nats) of the attention of some queries, less the mass on the first token, over all heads. It is
    added to the loss with a small factor: a head without use then rests on the first token, as in large models."""
    B, nh, L, hd = q.shape
    qs = q[:, :, rows].reshape(B, k.shape[1], -1, hd)
    s = (qs @ k.mT).float() / hd ** 0.5
    late = torch.arange(L, device=q.device)[None] > rows[:, None]
    p = s.masked_fill(late.repeat(nh // k.shape[1], 1), -1e9).softmax(-1)
    return -(p * (p + 1e-9).log()).sum(-1).mean() - p[..., 0].mean()


def quantised(w):
    """w as bf16(q * scale): integers q from -LEVELS to LEVELS, one float32 scale per row"""
    scale = (w.abs().amax(-1, keepdim=True) / LEVELS).clamp(min=1e-12)
    return ((w / scale).round() * scale).bfloat16().to(w.dtype)


class Model(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.cfg = cfg
        d, nh, nkv = cfg["hidden_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"]
        hd, ff = cfg["head_dim"], cfg["intermediate_size"]
        P = lambda *s, std: nn.Parameter(torch.randn(*s) * std)
        self.emb = P(cfg["vocab_size"], d, std=0.05)
        self.norm = nn.Parameter(torch.ones(d))
        self.layers = nn.ModuleList()
        for _ in range(cfg["num_hidden_layers"]):
            l = nn.Module()
            l.ln1, l.ln2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
            l.qn, l.kn = nn.Parameter(torch.full((hd,), GAIN)), nn.Parameter(torch.full((hd,), GAIN))
            l.wq = P(nh * hd, d, std=d ** -0.5)
            l.wk, l.wv = P(nkv * hd, d, std=d ** -0.5), P(nkv * hd, d, std=d ** -0.5)
            l.wo = nn.Parameter(torch.zeros(d, nh * hd))
            l.wg, l.wu = P(ff, d, std=d ** -0.5), P(ff, d, std=d ** -0.5)
            l.wd = nn.Parameter(torch.zeros(d, ff))
            self.layers.append(l)
        self.pre, self.post, self.lossf = pre, post, loss_parts
        self.tables = None
        self.quantise = False

    def rope_tables(self, dev):
        if self.tables is None or self.tables[0].device != torch.device(dev):
            hd = self.cfg["head_dim"]
            inv = 1.0 / self.cfg["rope_theta"] ** (torch.arange(0, hd, 2, dtype=torch.int64).float() / hd)
            f = torch.arange(self.cfg["max_position_embeddings"]).float()[:, None] * inv[None]
            self.tables = (f.cos().to(dev), f.sin().to(dev))
        return self.tables

    def weight(self, w):
        """the weight that the layers use. In the last part of the training it is the quantised one, with the gradient
        passed straight through."""
        return w + (quantised(w.detach()) - w.detach()) if self.quantise else w.view_as(w)

    def hidden(self, ids, pos, dtype=torch.bfloat16, hook=None, attn=None):
        """ids, pos [B, L] -> final residual stream [B*L, d] (before the last norm)"""
        c = self.cfg
        nh, nkv, hd = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        B, L = ids.shape
        ct, st = self.rope_tables(ids.device)
        pos = pos.reshape(-1)
        x = F.embedding(ids.reshape(-1), self.weight(self.emb)).to(dtype)
        for i, l in enumerate(self.layers):
            w = {n: self.weight(getattr(l, n)) for n in MATRICES}
            q, k, v = self.pre(x, l.ln1, w["wq"], w["wk"], w["wv"], l.qn, l.kn, ct, st, pos, nh, nkv, hd)
            q, k, v = (t.view(B, L, -1, hd).transpose(1, 2) for t in (q, k, v))
            if hook is not None:
                hook(i, q, k, v)
            if attn is None:
                a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                a = attn(i, q, k, v)
            x = self.post(x, a.transpose(1, 2).reshape(B * L, nh * hd), w["wo"], l.ln2, w["wg"], w["wu"], w["wd"])
        return x

    def logits(self, x):
        return (rms(x, self.norm) @ self.emb.to(x.dtype).t()).float()

    NAMES = dict(ln1="input_layernorm", ln2="post_attention_layernorm", qn="self_attn.q_norm", kn="self_attn.k_norm",
                 wq="self_attn.q_proj", wk="self_attn.k_proj", wv="self_attn.v_proj", wo="self_attn.o_proj",
                 wg="mlp.gate_proj", wu="mlp.up_proj", wd="mlp.down_proj")

    def hf_state(self, dtype=torch.bfloat16):
        out = {"model.embed_tokens.weight": self.emb, "model.norm.weight": self.norm}
        for i, l in enumerate(self.layers):
            for a, b in self.NAMES.items():
                out[f"model.layers.{i}.{b}.weight"] = getattr(l, a)
        return {k: v.detach().to("cpu", dtype).contiguous() for k, v in out.items()}

    @torch.no_grad()
    def load_hf(self, sd):
        self.emb.copy_(sd["model.embed_tokens.weight"])
        self.norm.copy_(sd["model.norm.weight"])
        for i, l in enumerate(self.layers):
            for a, b in self.NAMES.items():
                getattr(l, a).copy_(sd[f"model.layers.{i}.{b}.weight"])
        return self
