#!/usr/bin/env python3
"""Measure a model with exact attention on prompts of the project's own generators (greedy, bf16 on a GPU).

    eval.py --model DIR --items items.jsonl [--tasks a,b] [--shard 0/2] [--out scores.json]
    eval.py --model DIR --data DATA --perplexity 4096,8192,...

Each line of the items is an item of s2o-eval (prompt, answer_prefix, references, max_new_tokens, scorer). DIR has
model.q8, model.safetensors or master.*.safetensors; needle-7m's folder works, too. Scores are RULER's and
InfiniteBench's rules, as in crates/s2o-eval/src/score. Generation stops at the first line end of all answers.
"""
import argparse, json, math, os, re, time
import numpy as np
import torch
import torch.nn.functional as F
from generate import generate, load_model
from model import BOS


def score(item, text):
    refs, rule = item["references"], item["scorer"]
    if rule == "string_match_all":
        return sum(r.lower() in text.lower() for r in refs) / len(refs)
    if rule == "first_integer":
        found = re.search("[0-9]+", text)
        return float(bool(found) and found.group() in refs)
    if rule == "key_value":
        return float(any(w in refs for w in re.sub("[\n:\"'.,?!{}]", " ", text).split()))
    return float(any(r in text for r in refs))


def answer_items(a, model, dtype, dev, say):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer.json"))
    ends = torch.tensor(["\n" in tok.decode([i], skip_special_tokens=False) for i in range(tok.get_vocab_size())])
    groups = {}
    for line in open(a.items, encoding="utf-8"):
        item = json.loads(line)
        if not a.tasks or item["task"] in a.tasks.split(","):
            groups.setdefault((item["context_tokens"], item["task"]), []).append(item)
    part, parts = map(int, a.shard.split("/"))
    results = []
    for n, ((length, task), items) in enumerate(sorted(groups.items())):
        if n % parts != part or time.time() - a.started > a.seconds:
            continue
        prompts = [e.ids for e in tok.encode_batch([i["prompt"] + i["answer_prefix"] for i in items])]
        answers = generate(model, prompts, items[0]["max_new_tokens"], dtype, ends.to(dev))
        texts = [tok.decode(t, skip_special_tokens=False) for t in answers]
        scores = [score(i, t) for i, t in zip(items, texts)]
        results.append(dict(task=task, length=length, items=len(items), score=100 * sum(scores) / len(scores),
                            scores=scores))
        wrong = next((f"{t[:90]!r} for {i['references'][:5]}" for i, t, s in zip(items, texts, scores) if s < 1), "")
        say(f"{length:6d} {task:16s} {results[-1]['score']:5.1f} of {len(items)}", wrong[:220])
        if a.out:
            json.dump(results, open(a.out, "w"))
    return results


@torch.no_grad()
def perplexity(model, valid, L, n, dev, dtype):
    """over at most n windows of the validation text, spread evenly"""
    total, windows = 0.0, list(range(0, len(valid) - L - 1, max(L, (len(valid) - L - 1) // n)))[:n]
    for o in windows:
        s = torch.from_numpy(valid[o:o + L + 1].astype(np.int64)).to(dev)
        s[0] = BOS
        h = model.hidden(s[None, :-1], torch.arange(L, device=dev)[None], dtype)
        for i in range(0, L, 32768):
            total += F.cross_entropy(model.logits(h[i:i + 32768]), s[1 + i:1 + i + 32768], reduction="sum").item()
    return math.exp(total / L / len(windows))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--items")
    ap.add_argument("--tasks")
    ap.add_argument("--shard", default="0/1")
    ap.add_argument("--data")
    ap.add_argument("--perplexity")
    ap.add_argument("--out")
    ap.add_argument("--seconds", type=float, default=1e9, help="start no task and length after this time")
    a = ap.parse_args()
    a.started = time.time()
    say = lambda *x: print("[%5.1f]" % (time.time() - a.started), *x, flush=True)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if dev == "cuda" else torch.float32
    torch.backends.cuda.enable_cudnn_sdp(False)           # cuDNN prepares a new plan for each length
    model = load_model(a.model, dev)
    if a.items:
        answer_items(a, model, dtype, dev, say)
    if a.perplexity:
        valid = np.fromfile(os.path.join(a.data, "valid.bin"), dtype="<u2")
        for L in map(int, a.perplexity.split(",")):
            n = 32 if L <= 8192 else 16 if L <= 32768 else 8
            say(f"{L:6d} perplexity {perplexity(model, valid, L, n, dev, dtype):.2f}")


if __name__ == "__main__":
    main()
