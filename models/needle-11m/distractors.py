#!/usr/bin/env python3
"""Variable tracking with more than one chain in the text, which RULER does not have: the share of the right names.

    distractors.py --model DIR --data DATA [--length 4096] [--prompts 12]

Prompts have the worked example and the wording of the evaluation, and text of the validation documents. A model that
lists any names gets one of the number of chains.
"""
import argparse
import torch
from chains import chain_question, chain_text, draw_chains
from generate import generate, load_model
from samples import BOS, Maker
from tape import ANSWER, NONE, Tape


def prompt(mk, length, count):
    """tokens of the prompt, and the names"""
    ask = mk.enc("Memorize and track the chain of variable assignment hidden in the following text.\n\n")
    (example,), chains = draw_chains(mk, 1, [5]), draw_chains(mk, count, [5])
    text = chain_text(mk, 194, [example], 1.0)[0]
    tape = Tape().add(ask + text[:-1].tolist() + mk.enc(".\n"), NONE).join(chain_question(mk, *example, "chain"))
    text = chain_text(mk, length - len(tape) - 120, chains, 1.0)[0]
    tape.add(ask + text.tolist(), NONE)
    tape.ids[-1:] = mk.broken[0].get(tape.ids[-1]) or [tape.ids[-1], mk.newline]
    question = chain_question(mk, *chains[0], "chain")
    return [BOS] + tape.ids + question.ids[:question.flags.index(ANSWER)], chains[0][1]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--length", type=int, default=4096)
    ap.add_argument("--prompts", type=int, default=12)
    a = ap.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    mk, model = Maker(a.data, 987, "valid"), load_model(a.model, dev)
    ends = torch.tensor(["\n" in mk.tok.decode([i], skip_special_tokens=False) for i in range(mk.vocab)], device=dev)
    for count in (1, 2, 4):
        made = [prompt(mk, a.length, count) for _ in range(a.prompts)]
        dtype = torch.bfloat16 if dev == "cuda" else torch.float32
        texts = [mk.tok.decode(t) for t in generate(model, [ids for ids, _ in made], 30, dtype, ends)]
        score = sum(name in text for text, (_, names) in zip(texts, made) for name in names) / 5 / len(made)
        print(f"{a.length} tokens, {count} chains: {100 * score:.0f} % of the names", flush=True)


if __name__ == "__main__":
    main()
