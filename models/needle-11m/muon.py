"""The Muon optimiser: momentum, made orthogonal by Newton-Schulz steps, for all matrices of one shape at once."""
import torch


def newton_schulz(G, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.bfloat16() if G.is_cuda else G
    t = X.shape[-2] > X.shape[-1]
    if t:
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a, alpha=1.0)
    return X.mT if t else X


class Muon:
    def __init__(self, params, lr=0.02, mom=0.95, wd=0.05):
        self.groups = {}
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.buf = {s: torch.zeros(len(g), *s, device=g[0].device) for s, g in self.groups.items()}
        self.lr, self.mom, self.wd = lr, mom, wd

    @torch.no_grad()
    def step(self, scale):
        for s, ps in self.groups.items():
            g = torch.stack([p.grad for p in ps])
            m = self.buf[s]
            m.lerp_(g, 1 - self.mom)
            u = newton_schulz(g.lerp(m, self.mom)).float() * max(1.0, s[0] / s[1]) ** 0.5
            lr = self.lr * scale
            torch._foreach_mul_(ps, 1 - lr * self.wd)
            torch._foreach_add_(ps, list(u.unbind(0)), alpha=-lr)
