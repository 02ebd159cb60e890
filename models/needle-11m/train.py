#!/usr/bin/env python3
"""Train needle-11m. One process per GPU:

    torchrun --standalone --nproc-per-node 2 train.py --data DATA --ckpt CKPT --out OUT --run-seconds 500 --total 1000

The first invocation measures the seconds of a step at each length, by which the curriculum goes. `--total` is the
length of the whole schedule in seconds of training steps, `--run-seconds` what this invocation may use, all included.
A later invocation continues from CKPT/state.pt, or else from the exported CKPT/master.*.safetensors and
CKPT/train_state.json.
The samples are in samples.py, the curriculum in schedule.py. See README.md.
"""
import argparse, copy, json, os, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Model, loss_parts, post, pre, spread
from muon import Muon
from samples import NAMES
from schedule import END, LATE, QUANTISED, Stream, cost, rate, sizes

PARTS = 3                                    # files of the exported float32 weights
SPREAD = 0.01                                # factor of the penalty on diffuse attention, once it is complete


def setup(a):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dev = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    if dev != "cpu":
        torch.cuda.set_device(dev)
    if world > 1:
        dist.init_process_group("nccl" if dev != "cpu" else "gloo")
    return rank, world, dev


def faster_attention(dev, dtype, log):
    """switches the slower of the two attention implementations off"""
    q, k, v = (torch.randn(4, h, 32768, 128, device=dev, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    best = None
    for name in ("flash", "cudnn"):
        torch.backends.cuda.enable_flash_sdp(name == "flash"); torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False); torch.backends.cuda.enable_math_sdp(False)
        try:
            for _ in range(2):
                torch.cuda.synchronize(); t0 = time.time()
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                o.backward(torch.ones_like(o))
                torch.cuda.synchronize(); dt = time.time() - t0
            log(f"attention {name}: {dt * 1e3:.1f} ms for 4 x 32768 tokens, forward and backward")
            if best is None or dt < best[0]:
                best = (dt, name)
        except Exception as e:
            log(f"attention {name} failed: {str(e)[:200]}")
    torch.backends.cuda.enable_flash_sdp(best[1] == "flash")
    torch.backends.cuda.enable_cudnn_sdp(best[1] == "cudnn")


def export(model, out, meta):
    """float32 weights in a few files"""
    from safetensors.torch import save_file
    state = model.hf_state(torch.float32)
    groups = [{} for _ in range(PARTS)]
    for name in sorted(state, key=lambda n: -state[n].numel()):
        min(groups, key=lambda g: sum(t.numel() for t in g.values()))[name] = state[name]
    for i, g in enumerate(groups):
        save_file(g, os.path.join(out, f"master.{i}.safetensors"), metadata={"format": "pt"})
    json.dump(meta, open(os.path.join(out, "train_state.json"), "w"))


def load_master(model, path):
    from safetensors.torch import load_file
    state = {}
    for i in range(PARTS):
        state |= load_file(os.path.join(path, f"master.{i}.safetensors"))
    model.load_hf(state)


class Trainer:
    def __init__(self, a, dev, world, log):
        self.a, self.dev, self.world = a, dev, world
        self.dtype = torch.bfloat16 if dev != "cpu" else torch.float32
        torch.manual_seed(0)
        self.model = Model().to(dev)
        mats = [p for l in self.model.layers for p in (l.wq, l.wk, l.wv, l.wo, l.wg, l.wu, l.wd)]
        gains = [self.model.norm] + [p for l in self.model.layers for p in (l.ln1, l.ln2, l.qn, l.kn)]
        self.muon = Muon(mats, a.muon_lr)
        self.adam = torch.optim.AdamW([self.model.emb] + gains, lr=a.adam_lr, betas=(0.9, 0.98), weight_decay=0.0,
                                      fused=dev != "cpu")
        self.params = list(self.model.parameters())
        self.progress, self.step, self.first = 0.0, 0, 0
        if dev != "cpu":
            faster_attention(dev, self.dtype, log)
            if not a.no_compile:
                m = self.model
                m.pre, m.post, m.lossf = (torch.compile(f, dynamic=False) for f in (pre, post, loss_parts))

    def load(self, log):
        path = os.path.join(self.a.ckpt, "state.pt")
        if os.path.exists(path):
            c = torch.load(path, map_location="cpu", weights_only=False)
            self.model.load_state_dict(c["model"])
            self.adam.load_state_dict(c["adam"])
            self.muon.buf = {k: v.to(self.dev) for k, v in c["muon"].items()}
            self.progress, self.step = c["progress"], c["step"]
            self.first = self.step - 1000                 # the rate needs no second warm-up
        elif os.path.exists(os.path.join(self.a.ckpt, "master.0.safetensors")):
            load_master(self.model, self.a.ckpt)
            meta = json.load(open(os.path.join(self.a.ckpt, "train_state.json")))
            self.progress, self.step = meta["progress"], meta["step"]
            self.first = self.step
        if self.world > 1:
            for p in self.params:
                dist.broadcast(p.data, 0)
        log("step", self.step, "progress %.3f" % self.progress, "parameters", sum(p.numel() for p in self.params))

    def save(self):
        path = os.path.join(self.a.ckpt, "state.pt")
        torch.save(dict(model=self.model.state_dict(), adam=self.adam.state_dict(), muon=self.muon.buf,
                        progress=self.progress, step=self.step), path + ".new")
        os.replace(path + ".new", path)
        export(self.model, self.a.out, dict(progress=self.progress, step=self.step))

    def one_step(self, S, Fl, Po, progress):
        """loss sums, right arg-maxes, weights of the answers, and the spread of the attention"""
        m = self.model
        m.quantise = progress >= QUANTISED
        S, L = S.long(), Po.shape[1]
        factor = SPREAD * min(1.0, max(0.0, (progress - 0.08) / 0.2))
        if progress >= LATE:
            factor *= 0.25
        spreads, hook = [], None
        if factor:
            rows = torch.randint(L // 8, L, (16,), device=self.dev)
            hook = lambda i, q, k, v: spreads.append(spread(q, k, rows))
        x = m.hidden(S[:, :-1], Po.long(), self.dtype, hook=hook)
        marks = Fl[:, 1:].reshape(-1)
        ps, hit = m.lossf(x, m.norm, m.weight(m.emb), S[:, 1:].reshape(-1), marks)
        # one lost needle must not outweigh a batch: at least 100 answer tokens are counted
        weight = self.a.lam * (0.5 if LATE <= progress < 1.0 else 1.0)
        loss = ps[0] / ps[1].clamp(min=1) + weight * ps[2] / ps[3].clamp(min=100)
        wide = torch.stack(spreads).mean() if spreads else torch.zeros((), device=self.dev)
        (loss + factor * wide).backward()
        if self.world > 1:
            flat = torch.cat([p.grad.reshape(-1) for p in self.params])
            dist.all_reduce(flat)
            flat /= self.world
            for p, g in zip(self.params, flat.split([p.numel() for p in self.params])):
                p.grad.copy_(g.view_as(p))
        scale = min(1.0, (self.step - self.first + 1) / 100) * rate(progress)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.muon.step(scale)
        for g in self.adam.param_groups:
            g["lr"] = self.a.adam_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return ps.detach(), hit, marks >= 2, wide.detach()


def bench(t, log):
    """seconds per step at each length, on random tokens; the weights stay as they are"""
    state, costs = copy.deepcopy(t.model.state_dict()), {}
    for n, N in sizes():
        S = torch.randint(8, 4096, (N // n, n + 1), device=t.dev)
        Fl = torch.full((N // n, n + 1), 1, dtype=torch.uint8, device=t.dev)
        Po = torch.arange(n, device=t.dev, dtype=torch.int32).repeat(N // n, 1)
        times = []
        for _ in range(4):
            torch.cuda.synchronize(); t0 = time.time()
            t.one_step(S, Fl, Po, 0.9)
            torch.cuda.synchronize(); times.append(time.time() - t0)
        costs[n, N] = min(times)
        log(f"length {n}: {min(times) * 1e3:.1f} ms for {N} tokens, {N / min(times) / 1e6:.2f} Mtok/s a GPU, "
            f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB, first step {times[0]:.1f} s")
    t.model.load_state_dict(state)
    for buffer in t.muon.buf.values():
        buffer.zero_()
    t.adam.state.clear()
    return costs


def step_costs(a, t, rank, world, log):
    path = os.path.join(a.ckpt, "costs.json")
    known = os.path.exists(path)
    if world > 1:
        dist.barrier()
    if not known:
        costs = bench(t, log) if t.dev != "cpu" else {size: cost(*size) for size in sizes()}
        if rank == 0:
            with open(path, "w") as f:
                json.dump([[*size, seconds] for size, seconds in costs.items()], f)
        if world > 1:
            dist.barrier()
    return {(n, N): seconds for n, N, seconds in json.load(open(path))}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--data", required=True)
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--run-seconds", type=float, default=500)
    ap.add_argument("--started", type=float, default=time.time(), help="the second from which --run-seconds counts")
    ap.add_argument("--total", type=float, default=1000)
    ap.add_argument("--workers", type=int, default=13)
    ap.add_argument("--lam", type=float, default=1.0)
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=3e-3)
    ap.add_argument("--maxlen", type=int, default=131072, help="cut all lengths (for tests)")
    ap.add_argument("--tokens", type=int, default=0, help="tokens per step and GPU (for tests)")
    ap.add_argument("--no-compile", action="store_true")
    a = ap.parse_args()
    rank, world, dev = setup(a)
    log = lambda *x: rank == 0 and print("[%6.1f]" % (time.time() - a.started), *x, flush=True)
    os.makedirs(a.ckpt, exist_ok=True)
    os.makedirs(a.out, exist_ok=True)
    t = Trainer(a, dev, world, log)
    costs = step_costs(a, t, rank, world, log)
    t.load(log)
    stream = Stream(a.data, 2 * rank + 1, (t.step, t.progress, a.total, costs), a.maxlen, a.tokens)
    it = iter(torch.utils.data.DataLoader(
        stream, batch_size=None, num_workers=a.workers, prefetch_factor=4 if a.workers else None,
        pin_memory=dev != "cpu", multiprocessing_context="spawn" if a.workers else None))
    run(a, t, it, rank, world, dev, log)


def run(a, t, it, rank, world, dev, log):
    sums, tasks = torch.zeros(5, device=dev), {}
    last, saved, nst, ntok, waited, lengths = time.time(), time.time(), 0, 0, 0.0, {}
    while True:
        t0 = time.time()
        S, Fl, Po, T, progress = next(it)
        waited += time.time() - t0
        progress = float(progress)
        t.progress = progress
        S, Fl, Po, T = (x.to(dev, non_blocking=True) for x in (S, Fl, Po, T))
        ps, hit, answers, wide = t.one_step(S, Fl, Po, progress)
        L = Po.shape[1]
        table = tasks.setdefault(L, torch.zeros(2, len(NAMES), device=dev))
        B = len(T)
        table[0].index_add_(0, T, (hit * answers).view(B, -1).sum(1))
        table[1].index_add_(0, T, answers.view(B, -1).float().sum(1))
        sums += torch.cat([ps, wide[None]])
        t.step += 1; nst += 1; ntok += Po.numel() * world
        lengths[L] = lengths.get(L, 0) + 1
        if t.step % 10 == 0 or L > 32768:               # the same steps on all GPUs
            now = time.time()
            flag = torch.tensor([float(now - a.started > a.run_seconds or progress >= END)], device=dev)
            if world > 1:
                dist.broadcast(flag, 0)
            stop = bool(flag.item())
            if now - last > (20 if dev != "cpu" else 2) or stop:
                v, dt = sums.tolist(), now - last
                log(f"step {t.step} p {progress:.3f} rate {rate(progress):.2f} text {v[0] / max(v[1], 1):.3f} "
                    f"ans {v[2] / max(v[3], 1):.3f} spread {v[4] / max(nst, 1):.2f} {ntok / dt / 1e6:.2f} Mtok/s, "
                    f"{nst} steps, waited {waited:.1f} s")
                for n in sorted(tasks):
                    hits, counts = tasks[n].tolist()
                    log(f"    {n:6d} x {lengths[n]:3d}:", " ".join("%s %.3f" % (name, h / c)
                                                                   for name, h, c in zip(NAMES, hits, counts) if c))
                sums.zero_(); tasks.clear(); lengths.clear()
                last, nst, ntok, waited = now, 0, 0, 0.0
            if stop:
                break
            if rank == 0 and now - saved > 150:
                t.save()
                saved = time.time()
    if rank == 0:
        t.save()
        log("saved at step", t.step, "progress %.4f" % t.progress, "gains of q and k",
            [round((l.qn.abs().mean() * l.kn.abs().mean()).item(), 2) for l in t.model.layers])
    if world > 1:
        dist.barrier()
    os._exit(0)                                           # workers may hang in their queues


if __name__ == "__main__":
    main()
