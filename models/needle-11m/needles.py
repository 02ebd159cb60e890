"""Needle tasks: facts in text, in noise, or among other facts, and questions about them.

RULER*, PASSKEY, KEYED, CITY and DIGITS are the phrasings of the evaluation (crates/s2o-eval/src/tasks), and so is the
JSON object; OTHERS are in training only.
"""
import numpy as np
from pieces import a_key, a_value, fact, formatted, question
from tape import ANSWER, BULK, NONE, TEXT, Tape

QUIZ = ("Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n")
PREFACES = [QUIZ, "There is important information hidden inside a lot of irrelevant text. Find it and memorize it. "
            "I will quiz you about it.\n", "Read the following text carefully and remember the facts in it.\n", ""]
# (fact, question and beginning of the answer); {k} key, {v} value, {s} the kind of value
RULER = ("One of the special magic {s}s for {k} is:", "What is the special magic {s} for {k} mentioned in the provided "
         "text? The special magic {s} for {k} mentioned in the provided text is:")
RULER_SEVERAL = ("What are all the special magic {s}s for {k} mentioned in the provided text? "
                 "The special magic {s}s for {k} mentioned in the provided text are")
KEYED = ("The special magic number for {k} is:", "What is the special magic number for {k}? "
         "The special magic number for {k} is:")
CITY = ("The special magic {k} number is:", "What is the special magic {k} number? The special magic {k} number is:")
OTHERS = [("The pass key for {k} is", "What is the pass key for {k}? The pass key for {k} is"),
          ("The secret code of {k} is", "What is the secret code of {k}? The secret code of {k} is"),
          ("The phone number of {k} is", "What is the phone number of {k}? The phone number of {k} is"),
          ("Note that {k} has the number", "Which number has {k}? According to the text, {k} has the number"),
          ("In the table, {k} stands for", "For what does {k} stand in the table? In the table, {k} stands for"),
          ("{k}:", "{k}:")]
PASSKEY = ("The pass key is {v}. Remember it. {v} is the pass key.\n", "What is the pass key? The pass key is")
DIGITS = ("The sequence of digits is {v}. Remember it. {v} is the sequence of digits.\n",
          "What is the sequence of digits? The sequence of digits is")


def header(mk, kind):
    u = mk.r.random()
    return mk.enc(QUIZ.replace("number", kind) if u < 0.6 else mk.r.choice(PREFACES))


def assemble(mk, n, head, facts, questions, noise, later=0.0, ordered=False):
    """a haystack with facts, and questions at its end. questions: (index of the fact or None, Tape); `later` is the
    probability that a question with a fact stands somewhere between its fact and the end."""
    middle, last = [], []
    for i, q in questions:
        (middle if i is not None and mk.r.random() < later else last).append((i, q))
    size = n - len(head) - 8 - sum(len(f) + 1 for f in facts) - sum(len(q) + 1 for _, q in questions)
    if size < 32:
        return None
    hay, flags = mk.haystack(size, noise)
    depths = sorted(mk.r.random() for _ in facts) if ordered else [mk.r.random() for _ in facts]
    place = mk.places(hay)
    at = [place(d) for d in depths]
    placed = [(p, i, f) for i, (p, f) in enumerate(zip(at, facts))]
    for i, q in middle:
        d = at[i] / size
        one = Tape().add(q.ids[:-1] + mk.enc(".\n"), q.flags)
        if len(one.ids) == len(one.flags):
            placed.append((place(d + (1 - d) * mk.r.random()), len(facts) + 1, one))
    ids, flags = mk.blank_line(*mk.insert(hay, flags, placed))
    tail = Tape()
    for _, q in last:
        tail.join(q)
    return (np.concatenate([head, ids, tail.ids]).astype(np.int32),
            np.concatenate([np.full(len(head), NONE), flags, tail.flags]).astype(np.uint8))


def passkey(mk, n):
    if mk.r.random() < 0.65:
        (line, ask), v = PASSKEY, mk.number(7 if mk.r.random() < 0.7 else mk.r.randint(4, 9))
        head = mk.r.choice(PREFACES)
    else:
        (line, ask), v, head = DIGITS, mk.number(10 if mk.r.random() < 0.7 else mk.r.randint(5, 12)), PREFACES[1]
    a, b, c = line.split("{v}")
    f = Tape().add(mk.enc(a[:-1]), TEXT).add(mk.number_ids(v), NONE).add(mk.enc(b[:-1]), TEXT)
    f.add(mk.number_ids(v), ANSWER).add(mk.enc(c), TEXT)
    q = Tape().add(mk.enc(ask), NONE).add(mk.number_ids(v), ANSWER).add(mk.enc(".\n\n"), ANSWER)
    noise = 0.25 if line == PASSKEY[0] else 0.85
    return assemble(mk, n, mk.enc(head), [f], [(0, q)], noise)


def needles(mk, n):
    """RULER's needles, with one or several keys, values of a key, and keys of a question"""
    kind = mk.r.choices(["number", "uuid", "word"], [67, 26, 7])[0]
    cost = 30 if kind != "uuid" else 56
    most = max(1, n // (4 * cost))
    u = mk.r.random()
    if u < 0.2:
        keys, values = 1, 1
    elif u < 0.4:
        keys, values = min(most, mk.r.choice([2, 4, 4, 8, 16])), 1
    elif u < 0.7:                                         # several keys of one question
        keys, values = min(most, mk.r.choice([2, 3, 4, 4, 4, 5, 6, 8])), 1
    else:                                                 # several values of one key
        values = min(most, mk.r.choice([2, 3, 4, 4, 4, 5, 6]))
        keys = min(max(1, most // values), mk.r.choice([1, 1, 2, 3, 4]))
    names = mk.different(keys, mk.word if mk.r.random() < 0.6 else lambda: a_key(mk))
    values = [[a_value(mk, kind) for _ in range(values)] for _ in names]
    facts = [fact(mk, RULER[0], k, v, kind) for k, vs in zip(names, values) for v in vs]
    room, questions = n // 4, []
    several = len(values[0]) > 1

    def ask(chosen):
        listed = [names[i] for i in chosen]
        k = listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + (", and " if len(listed) > 2 or
                                                                     mk.r.random() < 0.5 else " and ") + listed[-1]
        q = Tape().add(formatted(mk, RULER_SEVERAL, k, kind), NONE)
        answers = [v for i in chosen for v in values[i]]
        for j, v in enumerate(answers):
            q.add(mk.enc("" if j == 0 else "," if j < len(answers) - 1 else ", and"), ANSWER)
            q.add(mk.value_ids(v), ANSWER)
        return None, q.add(mk.enc(".\n\n"), ANSWER)

    order = list(range(len(names)))
    for _ in range(3 if n < 4096 else 6):
        mk.r.shuffle(order)
        if u >= 0.4 and (several or mk.r.random() < 0.75):
            count = 1 if several and mk.r.random() < 0.8 else mk.r.randint(1 if several else 2, max(2, len(order)))
            made = [ask(order[:count])]
        else:
            made = [] if several else [(i, question(mk, RULER[1], names[i], values[i][0], kind)) for i in order[:8]]
        for i, q in made:
            if room > len(q) and q.ids not in [old.ids for _, old in questions]:
                room -= len(q)
                questions.append((i, q))
    if several:                                           # answers list the values in the order of the text
        return assemble(mk, n, header(mk, kind), facts, questions, 0.3, ordered=True)
    return assemble(mk, n, header(mk, kind), facts, questions, 0.3, later=mk.r.choice([0, 0, 0.5]))


def keyed(mk, n):
    """one to 64 facts of one form"""
    template = mk.r.choice([KEYED, KEYED, CITY] + OTHERS)
    kind = "word" if mk.r.random() < 0.15 else "number"
    most = max(1, n // 90)
    count = min(most, mk.r.choice([1, 1, 4, 4, 16, 16, 32, 64]))
    draw = mk.name if template is CITY else mk.word if mk.r.random() < 0.6 else lambda: a_key(mk)
    pairs = [(k, a_value(mk, kind)) for k in mk.different(count, draw)]
    facts = [fact(mk, template[0], k, v) for k, v in pairs]
    order = list(range(len(pairs)))
    mk.r.shuffle(order)
    questions = [(i, question(mk, template[1], *pairs[i])) for i in order[:min(24, max(1, n // 200))]]
    return assemble(mk, n, mk.enc(mk.r.choice(PREFACES)), facts, questions, 0.2, later=mk.r.choice([0, 0.4]))


def lines(mk, n, uuids):
    """nothing but facts of one form. Many questions; in half of the problems some facts come again, too."""
    template = RULER if mk.r.random() < 0.65 else mk.r.choice([KEYED] + OTHERS)
    kind = "uuid" if uuids else mk.r.choices(["number", "word"], [88, 12])[0]
    key = mk.uuid if uuids else mk.word if mk.r.random() < 0.6 else lambda: a_key(mk)
    if uuids and mk.r.random() < 0.2:
        key = mk.word
    head = header(mk, kind)
    again, flag = mk.r.random() < 0.5, BULK if uuids else ANSWER
    tape, known, seen = Tape().add(head, NONE), [], set()
    wanted = mk.r.randint(10, 40) if n >= 4096 else max(2, n // 300)
    unit = None
    while True:
        if again and len(known) > 3 and mk.r.random() < 0.3:
            k, v = mk.r.choice(known)
            f = fact(mk, template[0], k, v, kind, BULK)
        else:
            k = key()
            if k in seen:
                continue
            seen.add(k)
            v = a_value(mk, kind)
            known.append((k, v))
            f = fact(mk, template[0], k, v, kind)
            f.flags = [NONE] * len(f)
        if unit is None:
            unit = len(f) + len(formatted(mk, template[1], k, kind)) + 8
            wanted = max(1, min(wanted, n // (3 * unit)))
        if len(tape) + len(f) + 24 + wanted * (unit + 16) > n:
            break
        tape.join(f)
    tape.ids[-1:], tape.flags[-1:] = mk.enc(".\n\n"), [NONE]
    mk.r.shuffle(known)
    for k, v in known[:wanted]:
        q = question(mk, template[1], k, v, kind, flag)
        if len(tape) + len(q) <= n:
            tape.join(q)
    return tape


def words_to_numbers(mk, n):
    return lines(mk, n, False)


def uuids_to_uuids(mk, n):
    return lines(mk, n, True)


def json(mk, n):
    """a JSON object of UUIDs, and some of its keys"""
    tape = Tape().add(mk.enc("Find the value of one key in the JSON object below.\n\nJSON object:\n{\""), NONE)
    wanted = mk.r.randint(4, 12) if n >= 4096 else max(1, n // 500)
    known = [(mk.uuid(), mk.uuid()) for _ in range(max(1, (n - 60 - wanted * 100) // 74))]
    colon, comma, end = mk.enc("\":") + mk.enc(" \""), mk.enc("\",") + mk.enc(" \""), mk.enc("\"}\n\n")
    again = mk.r.random() < 0.5
    for i in range(len(known)):
        flag = NONE
        if again and i > 3 and mk.r.random() < 0.25:
            known[i], flag = known[mk.r.randrange(i)], BULK
        k, v = known[i]
        tape.add(comma if i else [], NONE).add(mk.raw(k), NONE).add(colon, NONE).add(mk.raw(v), flag)
    tape.add(end, NONE)
    mk.r.shuffle(known)
    for k, v in known[:wanted]:
        q = Tape().add(mk.enc("Key: \""), NONE).add(mk.raw(k), NONE)
        q.add(mk.enc("\"\nThe value of this key is:"), NONE).add(mk.enc(" \""), ANSWER).add(mk.raw(v), BULK)
        q.add(mk.enc("\"\n\n"), ANSWER)
        if len(tape) + len(q) <= n:
            tape.join(q)
    return tape
