"""Training samples: plain text, passkeys, keyed needles and chains of variables, and the mixture by training time."""
import json, os, random
import numpy as np
import torch
from model import BOS, CFG

PREFACES = ["Some special magic numbers are hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the numbers afterwards.\n",
            "There is important information hidden inside a lot of irrelevant text. Find it and memorize it. "
            "I will quiz you about it.\n",
            "Read the following text carefully and remember the facts in it.\n"]
# (needle, question prefix) with {k} the key and {v} the value
NEEDLES = [("The special magic number for {k} is: {v}.",
            "What is the special magic number for {k}? The special magic number for {k} is:"),
           ("One of the special magic numbers for {k} is: {v}.",
            "What is the special magic number for {k} mentioned in the provided text? "
            "The special magic number for {k} mentioned in the provided text is:"),
           ("The pass key for {k} is {v}. Remember it.", "What is the pass key for {k}? The pass key for {k} is"),
           ("The secret code of {k} is {v}.", "What is the secret code of {k}? The secret code of {k} is"),
           ("The phone number of {k} is {v}.", "What is the phone number of {k}? The phone number of {k} is"),
           ("Note that {k} has the number {v}.", "Which number has {k}? According to the text, {k} has the number"),
           ("{k}: {v}", "{k}:")]
PASSKEY = ("The pass key is {v}. Remember it. {v} is the pass key.", "What is the pass key? The pass key is")
VARS = ("VAR {k} = {v}.", "What is the value of VAR {k}? VAR {k} =")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Maker:
    """makes training samples of exactly L+1 tokens with a flag per token: 0 no loss, 1 text, 2 answer"""

    def __init__(self, data, seed):
        from tokenizers import Tokenizer
        self.tok = Tokenizer.from_file(os.path.join(data, "tokenizer.json"))
        self.words = json.load(open(os.path.join(data, "words.json")))
        self.text = np.memmap(os.path.join(data, "train.bin"), dtype="<u2", mode="r")
        self.r = random.Random(seed)
        self.np = np.random.default_rng(seed)
        v = self.tok.get_vocab()
        self.vocab = len(v)
        self.is_end = np.zeros(self.vocab, bool)
        for s, i in v.items():
            if s.endswith(".") or s.endswith("Ċ") or s.endswith(".)"):
                self.is_end[i] = True
        self.noise = self.enc(" " + NOISE)

    def enc(self, s):
        return self.tok.encode(s, add_special_tokens=False).ids

    def slice(self, n):
        if self.r.random() < 0.05 and n > 64:             # synthetic noise haystack
            reps = n // len(self.noise) + 1
            return np.array((self.noise * reps)[:n], dtype=np.int32)
        o = self.r.randrange(0, len(self.text) - n - 1)
        return self.text[o:o + n].astype(np.int32)

    def key(self):
        r = self.r
        u = r.random()
        if u < 0.7:
            return r.choice(self.words)
        if u < 0.9:
            return r.choice(self.words) + "-" + r.choice(self.words)
        return self.letters()

    def letters(self):
        return "".join(self.r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))

    def value(self):
        r = self.r
        u = r.random()
        if u < 0.85:
            n = 7 if r.random() < 0.6 else r.randint(4, 9)
            return str(r.randrange(10 ** (n - 1), 10 ** n))
        return r.choice(self.words) if u < 0.93 else r.choice(self.words) + " " + r.choice(self.words)

    def needle(self, tpl, k, v):
        """tokens and flags of one needle sentence: the value tokens carry no loss"""
        ids, fl = [], []
        parts = tpl.replace("{k}", k).split("{v}")
        for i, p in enumerate(parts):
            if i:
                e = self.enc(" " + v)
                ids += e
                fl += [0 if i == 1 else 2] * len(e)
            if i < len(parts) - 1:
                p = p.rstrip(" ")
            e = self.enc(p)
            ids += e
            fl += [1] * len(e)
        return ids, fl

    def qa(self, q, v):
        a, b, c = self.enc(q), self.enc(" " + v), self.enc(".\n")
        return a + b + c, [0] * len(a) + [2] * len(b) + [1] * len(c)

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

    def synth(self, L):
        r = self.r
        blocks, quests, mids = [], [], []
        u = r.random()
        cap = L // 3                                      # tokens that needles and questions may take
        if u < 0.10:                                      # classic passkey
            v = self.value()
            blocks.append(self.needle(PASSKEY[0], "", v))
            quests.append(self.qa(PASSKEY[1], v))
        elif u < 0.36:                                    # variable tracing, chains of 1..3
            vals = []
            for _ in range(r.randint(1, 4)):
                v, prev = str(r.randrange(10000, 100000)), None
                for h in range(r.choice([1, 2, 2, 3])):
                    k = r.choice(self.words) if r.random() < 0.7 else self.letters()
                    blocks.append(self.needle(VARS[0], k, v if prev is None else "VAR " + prev))
                    vals.append((k, v))
                    prev = k
            r.shuffle(vals)
            quests = [self.qa(VARS[1].replace("{k}", k), v) for k, v in vals[:8]]
        else:                                             # keyed needles
            t = r.choice(NEEDLES if r.random() < 0.5 else NEEDLES[:2])
            hi = 8 if L < 2048 else 16 if L < 8192 else 32
            n = r.choice([1, 2, 4, 4, 8, hi, hi]) if r.random() < 0.8 else r.randint(8, max(9, min(128, cap // 60)))
            kv, used = [], set()
            for _ in range(n):
                k = self.key()
                if k not in used:
                    used.add(k)
                    kv.append((k, self.value()))
            tt = [t if r.random() < 0.9 else r.choice(NEEDLES[:6]) for _ in kv]
            for (k, v), t1 in zip(kv, tt):
                blocks.append(self.needle(t1[0], k, v))
            order = list(zip(kv, tt, blocks))
            r.shuffle(order)
            for (k, v), t1, b in order[:12 if L < 8192 else 40]:
                qa = self.qa(t1[1].replace("{k}", k), v)
                if r.random() < 0.3:
                    mids.append((blocks.index(b), qa))
                else:
                    quests.append(qa)
        tail, tf = self.enc("\n\n"), [1]
        tf = [1] * len(tail)
        for a, b in quests:
            if len(tail) + len(a) < cap:
                tail += a
                tf += b
        head = [BOS] + (self.enc(r.choice(PREFACES)) if r.random() < 0.5 else [])
        used, keep = len(head) + len(tail), []
        for b in blocks:
            if used + len(b[0]) + 4 < L * 2 // 3:
                keep.append(b)
                used += len(b[0]) + 2
        # in-text questions go after their needle
        midq = []
        for i, qa in mids:
            if i < len(keep) and used + len(qa[0]) + 4 < L * 2 // 3:
                midq.append((i, qa))
                used += len(qa[0]) + 2
        n = L + 1 - len(head) - len(tail) - sum(len(b[0]) + 2 for b in keep) - sum(len(q[0]) + 2 for _, q in midq)
        hay = self.slice(n)
        cand = np.flatnonzero(self.is_end[hay]) + 1
        if len(cand) == 0:
            cand = np.array([n // 2])
        nl = self.enc("\n")[0]
        depth = sorted(r.random() for _ in keep) if u < 0.36 else [r.random() for _ in keep]
        ins = []
        for d, b in zip(depth, keep):
            ins.append((int(cand[min(len(cand) - 1, np.searchsorted(cand, int(d * n)))]), r.random(), b))
        for i, qa in midq:
            p0 = ins[i][0]
            at = min(len(cand) - 1, np.searchsorted(cand, r.randint(min(p0, n), n)))
            ins.append((int(cand[at]), 1.0 + r.random(), qa))
        ins.sort(key=lambda t: (t[0], t[1]))
        s, f, last = [np.array(head)], [np.array([0] + [1] * (len(head) - 1))], 0
        for p, _, (ids, fl) in ins:
            s += [hay[last:p], np.array([nl] + ids + [nl])]
            f += [np.ones(p - last), np.array([1] + fl + [1])]
            last = p
        s += [hay[last:], np.array(tail)]
        f += [np.ones(n - last), np.array(tf)]
        return np.concatenate(s), np.concatenate(f)

    def sample(self, L, psynth):
        if self.r.random() < psynth:
            s, f = self.synth(L)
        else:
            s, f = self.plain(L + 1)
            s[0], f[0] = BOS, 0
        assert len(s) == L + 1 and len(f) == L + 1, (len(s), len(f), L)
        return s, f

    def batch(self, N, L, psynth, pose):
        B = N // L
        S, Fl, Po = np.empty((B, L + 1), np.int16), np.empty((B, L + 1), np.uint8), np.empty((B, L), np.int32)
        mx = CFG["max_position_embeddings"]
        for b in range(B):
            S[b], Fl[b] = self.sample(L, psynth)
            Po[b] = np.arange(L)
            if self.r.random() < pose and L < mx:         # positional skips: far distances from short samples
                room = mx - L
                k = self.r.randint(1, 6)
                jumps = self.np.dirichlet(np.ones(k + 1))[:k] * room * self.r.random()
                for c, j in zip(sorted(self.r.randrange(1, L) for _ in range(k)), jumps):
                    Po[b, c:] += int(j)
        return torch.from_numpy(S), torch.from_numpy(Fl), torch.from_numpy(Po)


STAGES = [  # until this share of the schedule: {length: share of the batches}, share of synthetic samples,
    # share with positional skips
    (0.06, {512: 0.5, 1024: 0.5}, 0.6, 0.0),
    (0.25, {1024: 0.3, 2048: 0.7}, 0.55, 0.1),
    (0.42, {2048: 0.3, 8192: 0.7}, 0.55, 0.3),
    (0.76, {2048: 0.2, 8192: 0.3, 32768: 0.5}, 0.6, 0.25),
    (1.01, {2048: 0.2, 8192: 0.2, 32768: 0.35, 131072: 0.25}, 0.65, 0.1)]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data, N, progress, seed, maxlen):
        self.a = (data, N, progress, seed, maxlen)

    def __iter__(self):
        data, N, progress, seed, maxlen = self.a
        wi = torch.utils.data.get_worker_info()
        mk = Maker(data, seed * 1000 + (wi.id if wi else 0))
        while True:
            p = progress.value
            st = next(s for s in STAGES if p < s[0])
            L = mk.r.choices(list(st[1]), list(st[1].values()))[0]
            yield mk.batch(N, min(L, maxlen), st[2], st[3])
