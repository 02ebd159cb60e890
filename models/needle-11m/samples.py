"""Training samples: plain text with repeated spans, and generated tasks; and the share of each by length."""
import numpy as np
from tape import EOS, NONE, TEXT, Source
from tasks import TASKS

BOS = 0
NAMES = ["plain"] + list(TASKS)
# relative share of each task among the samples that are not plain text
SHARES = dict(passkey=7, needles=30, keyed=12, mk2=10, mk3=12, json=4, vt=13, cwe=14, fwe=11, count=1)


class Maker(Source):
    """makes training samples of exactly L+1 tokens with a flag per token"""

    def plain(self, L):
        s = self.slice(L)
        f = np.ones(L, np.uint8)
        if self.r.random() < 0.4:                         # repeated spans: text or random tokens
            for _ in range(self.r.randint(1, 4)):
                n = self.r.randint(16, min(512, L // 4))
                src = self.r.randrange(0, L - 2 * n)
                dst = self.r.randrange(src + n, L - n + 1)
                if self.r.random() < 0.4:
                    s[src:src + n] = self.np.integers(8, self.vocab, n)
                    f[src:src + n] = 0
                s[dst:dst + n] = s[src:src + n]
                f[dst:dst + min(4, n)] = 0
        return s, f

    def problem(self, task, n):
        made = TASKS[task](self, n)
        if made is None:
            return None
        if not isinstance(made, tuple):
            made = np.array(made.ids, np.int32), np.array(made.flags, np.uint8)
        return made if len(made[0]) <= n else None

    def sample(self, L, synthetic):
        """the tokens, their flags, and the index of the task in NAMES"""
        r = self.r
        if r.random() >= synthetic:
            s, f = self.plain(L + 1)
            s[0], f[0] = BOS, NONE
            return s, f, 0
        task = r.choices(list(SHARES), list(SHARES.values()))[0]
        ids, flags, left = [np.array([BOS])], [np.array([NONE])], L
        # one problem, or several with the sign for the end of a document between them
        parts = 1 if L < 1024 or r.random() < 0.7 else r.choice([2, 2, 3, 4])
        for i in range(parts):
            n = left if i == parts - 1 else int(left / (parts - i) * r.uniform(0.6, 1.2))
            made = self.problem(task, n if r.random() < 0.8 else int(n * r.uniform(0.5, 1)))
            if made is None:
                continue
            ids += [made[0], np.array([EOS])]
            flags += [made[1], np.array([TEXT])]
            left -= len(made[0]) + 1
            if left < 300:
                break
        if left > 0:
            tail = self.slice(left)
            ids.append(tail)
            flags.append(np.full(left, TEXT))
        s, f = np.concatenate(ids)[:L + 1], np.concatenate(flags)[:L + 1]
        assert len(s) == L + 1 and len(f) == L + 1, (task, len(s), len(f), L)
        return s, f, NAMES.index(task)

    def batch(self, N, L, synthetic, skips, positions):
        """N // L samples: tokens, flags, positions, tasks"""
        B = N // L
        S, F = np.empty((B, L + 1), np.int16), np.empty((B, L + 1), np.uint8)
        P, T = np.empty((B, L), np.int32), np.empty(B, np.int64)
        for b in range(B):
            S[b], F[b], T[b] = self.sample(L, synthetic)
            P[b] = np.arange(L)
            if self.r.random() < skips and L < positions:  # far distances from short samples
                k = self.r.randint(1, 6)
                jumps = self.np.dirichlet(np.ones(k + 1))[:k] * (positions - L) * self.r.random()
                for c, j in zip(sorted(self.r.randrange(1, L) for _ in range(k)), jumps):
                    P[b, c:] += int(j)
        return S, F, P, T
