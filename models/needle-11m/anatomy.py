#!/usr/bin/env python3
"""The attention of each head on one prompt of RULER: where its mass lies.

    anatomy.py --model DIR --items items.jsonl --task niah_multikey_1 --length 32768

Per layer and head, for queries of the second half and apart for the queries that predict the answer: the share of the
mass on the first token (sink), on the last 2,048 keys (recent), on the heaviest 1 % and 5 % of the visible keys, and
the median number of keys that hold 95 % of the mass.
"""
import argparse, json, os
import torch
from generate import load_model


@torch.no_grad()
def statistics(model, ids, answer, dev, dtype, window=2048, late=256):
    L, rows = len(ids), []
    sets = {"late": torch.linspace(L // 2, L - answer - 40, late).long(), "answer": torch.arange(L - answer - 1, L - 1)}

    def hook(i, q, k, v):
        for name, at in sets.items():
            at = at.to(dev)
            for h in range(q.shape[1]):
                s = q[0, h, at].float() @ k[0, h * k.shape[1] // q.shape[1]].float().t() / q.shape[-1] ** 0.5
                p = s.masked_fill_(torch.arange(L, device=dev)[None] > at[:, None], float("-inf")).softmax(-1)
                mass = p.sort(-1, descending=True).values.cumsum(-1)
                top = lambda f: mass.gather(1, ((at + 1).float() * f).ceil().long()[:, None] - 1).mean().item()
                recent = torch.stack([p[j, max(0, int(t) - window + 1):].sum() for j, t in enumerate(at)]).mean().item()
                rows.append(dict(layer=i, head=h, queries=name, sink=p[:, 0].mean().item(), recent=recent,
                                 top1=top(0.01), top5=top(0.05),
                                 k95=((mass < 0.95).sum(-1) + 1).float().median().item()))
    x = torch.tensor(ids, device=dev)[None]
    model.hidden(x, torch.arange(L, device=dev)[None], dtype, hook=hook)
    return rows


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--items", required=True)
    ap.add_argument("--task", default="niah_multikey_1")
    ap.add_argument("--length", type=int, default=32768)
    a = ap.parse_args()
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer.json"))
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)
    item = next(i for i in map(json.loads, open(a.items, encoding="utf-8"))
                if (i["task"], i["context_tokens"]) == (a.task, a.length))
    answer = tok.encode(" " + item["references"][0], add_special_tokens=False).ids
    ids = tok.encode(item["prompt"] + item["answer_prefix"]).ids + answer
    ids = ids[:131072]
    dtype = torch.bfloat16 if dev == "cuda" else torch.float32
    rows = statistics(load_model(a.model, dev), ids, len(answer), dev, dtype)
    both = [[r for r in rows if r["queries"] == name] for name in ("late", "answer")]
    print(f"{a.task}, {len(ids)} tokens")
    columns = "sink | recent | top 1 % | top 5 % | k95 |"
    print(f"| layer.head | late {columns} answer {columns}")
    print("| --- " * 11 + "|")
    for pair in zip(*both):
        names = ("sink", "recent", "top1", "top5", "k95")
        cells = " | ".join("%.3f | %.3f | %.3f | %.3f | %.0f" % tuple(r[k] for k in names) for r in pair)
        print(f"| {pair[0]['layer']}.{pair[0]['head']} | {cells} |")


if __name__ == "__main__":
    main()
