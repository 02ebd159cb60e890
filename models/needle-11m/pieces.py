"""Templates as tokens: facts, questions, random keys and values."""
from tape import ANSWER, NONE, TEXT, Tape


def formatted(mk, template, k, s="number"):
    """tokens of a template. The key is encoded apart, so that the rest comes from the cache."""
    out, spaced = [], False
    parts = template.replace("{s}", s).split("{k}")
    for i, part in enumerate(parts):
        if i:
            out += mk.value_ids(k) if spaced else mk.raw(k)
        spaced = part.endswith(" ")                       # then the space belongs to the key's first token
        out += mk.enc(part[:-1] if spaced and i < len(parts) - 1 else part)
    return out


def fact(mk, template, k, v, s="number", flag=NONE):
    return Tape().add(formatted(mk, template, k, s), TEXT).add(mk.value_ids(v), flag).add(mk.enc(".\n"), TEXT)


def question(mk, template, k, v, s="number", flag=ANSWER, end=".\n\n"):
    return Tape().add(formatted(mk, template, k, s), NONE).add(mk.value_ids(v), flag).add(mk.enc(end), flag)


def a_key(mk):
    u = mk.r.random()
    if u < 0.66:
        return mk.word()
    if u < 0.78:
        return mk.pair()
    if u < 0.86:
        return mk.uuid()
    return mk.letters(5) if u < 0.92 else mk.name()


def a_value(mk, kind):
    if kind == "uuid":
        return mk.uuid()
    if kind == "word":
        return mk.word() if mk.r.random() < 0.7 else mk.word() + " " + mk.word()
    return mk.number(7 if mk.r.random() < 0.75 else mk.r.randint(4, 10))
