"""Variable tracking: chains of assignments in noise or text. The phrasing with "chain" is the evaluation's, the one
with "chain(s)" is RULER's own."""
import numpy as np
from pieces import formatted
from tape import ANSWER, NONE, Tape

VARS = "VAR {k} ="


def chain_text(mk, n, chains, noise):
    """a haystack with the lines of chains [(value, names)]"""
    facts, order = [], []
    for value, names in chains:
        for i, name in enumerate(names):
            source = mk.number_ids(value) if i == 0 else mk.enc(" VAR") + mk.value_ids(names[i - 1])
            facts.append(Tape().add(formatted(mk, VARS, name), NONE).add(source, NONE).add(mk.enc(".\n"), NONE))
            order.append((len(order), i))
    # the lines of each chain stay in order, and chains mix
    slots = [c for c, (_, names) in enumerate(chains) for _ in names]
    mk.r.shuffle(slots)
    start = np.cumsum([0] + [len(names) for _, names in chains])
    taken, mixed = [0] * len(chains), []
    for c in slots:
        mixed.append(facts[start[c] + taken[c]])
        taken[c] += 1
    size = max(16, n - sum(len(f) + 1 for f in facts))
    hay, flags = mk.haystack(size, noise)
    place = mk.places(hay)
    at = [place(d) for d in sorted(mk.r.random() for _ in mixed)]
    return mk.insert(hay, flags, [(p, i, f) for i, (p, f) in enumerate(zip(at, mixed))])


def chain_question(mk, value, names, phrase):
    """question for the names, and the answer"""
    q = mk.enc("Question: Find all variables that are assigned the value") + mk.number_ids(value) + mk.enc(
        f" in the text above. Answer: According to the {phrase} of variable assignment in the text above,")
    q = q + mk.enc(" %d" % len(names)) + mk.enc(" variables are assigned the value") + mk.number_ids(value) + mk.enc(
        ", they are:")
    answer = [i for name in names for i in mk.value_ids(name)]
    return Tape().add(q, NONE).add(answer, ANSWER).add(mk.enc("\n\n"), ANSWER)


def draw_chains(mk, count, lengths):
    return [(mk.number(5), mk.different(mk.r.choice(lengths), lambda: mk.letters(5))) for _ in range(count)]


def variables(mk, n):
    phrase = mk.r.choice(["chain", "chain", "chain(s)"])
    ask = mk.enc(f"Memorize and track the {phrase} of variable assignment hidden in the following text.\n\n")
    tape = Tape()
    lengths = [5, 5, 5, 4, 3, 2, 6] if n >= 1000 else [1, 2, 2, 3, 3, 4, 5]
    if n >= 1000 and mk.r.random() < 0.75:                # the worked example
        (example,) = draw_chains(mk, 1, lengths[:1])
        hay, flags = chain_text(mk, 124 + 14 * len(example[1]), [example], 1.0)
        tape.add(ask, NONE).add(hay[:-1].tolist() + mk.enc(".\n"), NONE)
        tape.join(chain_question(mk, *example, phrase))
    most = max(1, (n - len(tape)) // 300)
    chains = draw_chains(mk, min(most, mk.r.choice([1, 1, 1, 2, 2, 3, 4, 6])), lengths)
    questions = [chain_question(mk, *c, phrase) for c in chains]
    if mk.r.random() < 0.35:                              # also the value of single variables
        flat = [(k, v) for v, names in chains for k in names]
        mk.r.shuffle(flat)
        for k, v in flat[:6]:
            q = Tape().add(formatted(mk, "What is the value of VAR {k}? VAR {k} =", k), NONE)
            questions.append(q.add(mk.number_ids(v), ANSWER).add(mk.enc(".\n\n"), ANSWER))
    mk.r.shuffle(questions)
    room = n - len(tape) - len(ask) - 4 - sum(map(len, questions))
    if room < 40 + 15 * sum(len(names) for _, names in chains):
        return None
    hay, flags = chain_text(mk, room, chains, 0.75)
    tape.add(ask, NONE).add(hay.tolist(), flags.tolist())
    end = mk.broken[0].get(tape.ids[-1]) or [tape.ids[-1], mk.newline]
    tape.ids[-1:], tape.flags[-1:] = end, [NONE] * len(end)
    for q in questions:
        tape.join(q)
    return tape
