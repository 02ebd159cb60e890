"""What a step trains on, as a function of the progress: lengths, shares, rates. Progress goes by the cost of the steps
that the benchmark of train.py measured, so that all processes know it without talking to each other."""
import random
import torch
from samples import Maker

POSITIONS = 131072
STAGES = [  # until this progress: tokens per step and GPU, {length: share of the steps}, share of generated tasks (one
    # for all lengths, or by length), share of samples with skipped positions
    (0.04, 65536, {512: 0.5, 1024: 0.5}, 0.55, 0.0),
    (0.28, 65536, {1024: 0.35, 2048: 0.65}, 0.55, 0.1),
    (0.50, 131072, {2048: 0.35, 8192: 0.65}, 0.55, 0.3),
    (0.7187, 131072, {2048: 0.25, 8192: 0.35, 32768: 0.4}, 0.55, 0.25),
    # the tasks are learned, the text is not: mostly text, and the longest samples
    (1.0, 131072, {2048: 0.67, 8192: 0.22, 32768: 0.07, 131072: 0.04},
     {2048: 0.15, 8192: 0.25, 32768: 0.5, 131072: 0.65}, 0.1),
    # more of the longest samples and of far distances
    (1.3, 131072, {2048: 0.45, 8192: 0.2, 32768: 0.2, 131072: 0.15},
     {2048: 0.3, 8192: 0.4, 32768: 0.7, 131072: 0.9}, 0.35)]
END = 1.26
LATE = 0.7187                                # from here on the answers weigh half, and diffuse attention a quarter
FLAT, QUANTISED = 0.4, 0.85                  # the rate is constant until FLAT; weights are quantised from QUANTISED on
AGAIN = 0.3                                  # the rate with which the stage after 1.0 begins


def cost(length, tokens):
    """seconds of a step on an H200, if they are not measured"""
    return tokens * (0.8e-6 + 8e-11 * length)


def sizes():
    """all (length, tokens per step and GPU), the largest first"""
    return sorted({(n, s[1]) for s in STAGES for n in s[2]}, reverse=True)


def stage(progress):
    return next(s for s in STAGES if progress < s[0])


def length(step, progress):
    shares = stage(progress)[2]
    return random.Random(step * 7919 + 13).choices(list(shares), list(shares.values()))[0]


def rate(progress):
    if progress < FLAT:
        return 1.0
    if progress < 1.0:
        return max(0.02, 1 - (progress - FLAT) / (1 - FLAT))
    return max(0.02, AGAIN * (END - progress) / (END - 1.0))


def walk(step, progress, total, costs):
    """(step, progress, length) of this and all later steps"""
    while True:
        n = length(step, progress)
        yield step, progress, n
        progress = min(END, progress + costs[n, stage(progress)[1]] / total)
        step += 1


class Stream(torch.utils.data.IterableDataset):
    """batches; worker w of W makes the steps w, w + W, ..., which is the order in which the loader asks for them"""

    def __init__(self, data, seed, start, maxlen=POSITIONS, tokens=0):
        self.a = data, seed, start, maxlen, tokens

    def __iter__(self):
        data, seed, start, maxlen, tokens = self.a
        info = torch.utils.data.get_worker_info()
        w, workers = (info.id, info.num_workers) if info else (0, 1)
        torch.set_num_threads(1)
        mk = Maker(data, seed * 1009 + start[0] * 31 + w)
        for i, (step, progress, n) in enumerate(walk(*start)):
            if i % workers == w:
                _, N, _, synthetic, skips = stage(progress)
                synthetic = synthetic[n] if isinstance(synthetic, dict) else synthetic
                n = min(n, maxlen)
                batch = mk.batch(max(tokens or N, n), n, synthetic, skips, POSITIONS)
                yield [torch.from_numpy(t) for t in batch] + [progress]
