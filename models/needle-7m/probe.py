"""Quick evaluation during and after the training: teacher-forced exact match, and loss on the validation text."""
import math, os
import numpy as np
import torch
import torch.nn.functional as F
from model import BOS, post, pre
from samples import Maker, NEEDLES, PASSKEY, PREFACES


class Prober:
    def __init__(self, data, seed=1234):
        self.mk = Maker(data, seed)
        self.mk.text = np.fromfile(os.path.join(data, "valid.bin"), dtype="<u2")

    def prompt(self, L, nk, depth=None, passkey=False):
        """ids of a prompt with its answer appended, total <= L; nk keyed needles, the asked one at `depth`"""
        mk, r = self.mk, self.mk.r
        ks = r.sample(mk.words, nk)
        vs = [str(r.randrange(10 ** 6, 10 ** 7)) for _ in ks]
        t = PASSKEY if passkey else NEEDLES[0]
        nd = [mk.enc("\n" + t[0].replace("{k}", k).replace("{v}", v) + "\n") for k, v in zip(ks, vs)]
        q = mk.enc("\n\n" + t[1].replace("{k}", ks[0]))
        ans = mk.enc(" " + vs[0])
        head = [BOS] + mk.enc(PREFACES[0])
        n = L - len(head) - len(q) - len(ans) - sum(map(len, nd))
        o = r.randrange(0, len(mk.text) - n)
        hay = mk.text[o:o + n].astype(np.int64)
        cand = np.concatenate([[0], np.flatnonzero(mk.is_end[hay]) + 1])
        ds = [depth if (i == 0 and depth is not None) else r.random() for i in range(nk)]
        ins = sorted((int(cand[np.abs(cand - d * n).argmin()]), i) for i, d in enumerate(ds))
        s, last = [np.array(head)], 0
        for p, i in ins:
            s += [hay[last:p], np.array(nd[i])]
            last = p
        s += [hay[last:], np.array(q), np.array(ans)]
        return np.concatenate(s).astype(np.int64), len(ans)


@torch.no_grad()
def exact(model, ids, nans, dev, dtype):
    x = torch.from_numpy(ids)[None].to(dev)
    h = model.hidden(x, torch.arange(x.shape[1], device=dev)[None], dtype)
    lg = model.logits(h[-nans - 1:-1])
    return bool((lg.argmax(-1) == x[0, -nans:]).all())


@torch.no_grad()
def valid_loss(model, valid, L, n, dev, dtype):
    tot = cnt = 0.0
    step = max(L, (len(valid) - L - 1) // n)
    for o in list(range(0, len(valid) - L - 1, step))[:n]:
        s = torch.from_numpy(valid[o:o + L + 1].astype(np.int64)).to(dev)
        s[0] = BOS
        h = model.hidden(s[None, :-1], torch.arange(L, device=dev)[None], dtype)
        for i in range(0, L, 32768):
            ce = F.cross_entropy(model.logits(h[i:i + 32768]), s[1 + i:1 + i + 32768], reduction="sum")
            tot += ce.item()
        cnt += L
    return tot / cnt


def probe(model, data, lens, n, dev, dtype, log):
    p = Prober(data)
    raw = model.pre, model.post
    model.pre, model.post = pre, post
    for L in lens:
        res = []
        for nk, pk in ((1, True), (1, False), (4, False), (16, False)):
            hits = [exact(model, *p.prompt(L, nk, (i + 0.5) / n, pk), dev, dtype) for i in range(n)]
            res.append("%s %d/%d" % ("passkey" if pk else f"{nk}-key", sum(hits), n))
        vl = valid_loss(model, p.mk.text, min(L, 131072), 4 if L >= 32768 else 16, dev, dtype)
        log(f"  L={L:6d}  " + "  ".join(res) + f"  valid loss {vl:.3f} ppl {math.exp(vl):.2f}")
    model.pre, model.post = raw
