"""The generated tasks. Each function makes one problem of at most n tokens: context, questions, answers.

RULER_*, PASSKEY, KEYED, DIGITS and JSON_* are the phrasings of the evaluation (crates/s2o-eval/src/tasks); the others
are in training only. Words, numbers, places and texts are random everywhere.
"""
import numpy as np
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
VARS = "VAR {k} ="


def formatted(mk, template, k, s="number"):
    """tokens of a template. The key is encoded apart, so that the rest comes from the cache."""
    out = []
    parts = template.replace("{s}", s).split("{k}")
    for i, part in enumerate(parts):
        if i:
            if out_ends_with_space:
                out += mk.value_ids(k)
            else:
                out += mk.raw(k)
        out_ends_with_space = part.endswith(" ")
        out += mk.enc(part[:-1] if out_ends_with_space and i < len(parts) - 1 else part)
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


# -- facts in text or noise

def passkey(mk, n):
    if mk.r.random() < 0.65:
        (line, ask), v, head = PASSKEY, mk.number(7 if mk.r.random() < 0.7 else mk.r.randint(4, 9)), mk.r.choice(PREFACES)
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
    kind = mk.r.choices(["number", "uuid", "word"], [75, 18, 7])[0]
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
            q.add(mk.enc("" if j == 0 else "," if j < len(answers) - 1 else ", and"), ANSWER).add(mk.value_ids(v), ANSWER)
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


# -- haystacks of facts

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


# -- chains of variables

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


# -- counting

LIST = ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n")


def numbered(mk, words, flag):
    tape = Tape()
    dot, digits, space = mk.enc("."), mk.digits, mk.space
    ids, flags = [], []
    for i, w in enumerate(words):
        number = (space if i else []) + [digits[d] for d in str(i + 1)] + dot
        word = mk.value_ids(w)
        ids += number
        ids += word
        flags += [flag] * (len(number) + len(word))
    return tape.add(ids, flags)


def list_block(mk, common, others, often, seldom, count):
    entries = common * often + others * seldom
    mk.r.shuffle(entries)
    tape = Tape().add(mk.enc(LIST), NONE).join(numbered(mk, entries, NONE))
    tape.add(mk.enc(f"\nQuestion: What are the {count} most common words in the above list?") +
             mk.enc(f" Answer: The top {count} words that appear most often in the list are:"), NONE)
    tape.add(mk.space, ANSWER)
    return tape.join(numbered(mk, common, ANSWER)).add(mk.enc("\n\n"), ANSWER)


def common_words(mk, n):
    tape, r = Tape(), mk.r
    count = 10 if n >= 1500 else r.randint(2, 4)
    if mk.r.random() < (0.85 if n >= 1500 else 0.4):
        words = mk.different(2 * count, mk.word)
        tape.join(list_block(mk, words[:count], words[count:], 3, 1, count))
    shrink = 1.0
    for _ in range(12):
        room = n - len(tape) - 80 - 5 * count
        part = room if not 2500 < n < 6000 or r.random() < 0.4 else min(room, r.randint(800, 2000))
        last, part = part == room, int(part * shrink)
        per = 4.4 + len(str(max(10, part // 7)))          # tokens per entry of the list
        often = min(r.choice([10, 20, 30, 30]), int(part * r.uniform(0.3, 0.6) / per / count))
        seldom = min(r.choice([1, 2, 3, 3]), max(1, often // 4))
        others = int((part / per - often * count) / seldom * 0.93)
        if often < 3 or others < count:
            break
        draw = mk.word if others < 12000 else lambda: mk.word() if r.random() < 0.4 else mk.pair()
        words = mk.different(count + others, draw)
        block = list_block(mk, words[:count], words[count:], often, seldom, count)
        if len(tape) + len(block) > n:
            shrink *= 0.9
            continue
        tape.join(block)
        if last:
            break
    return tape if len(tape) > n // 4 else None


CODED = ("Read the following coded text and track the frequency of each coded word. Find the three most frequently "
         "appeared coded words.")
CODED_QUESTION = ("\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                  "frequently appeared words in the above coded text? Answer: According to the coded text above, the "
                  "three most frequently appeared words are:")


def frequent_words(mk, n):
    """coded words with frequencies of Zipf's law. The dots are the most frequent, and do not count."""
    tape, r = Tape(), mk.r
    while n - len(tape) > 420:
        room = n - len(tape) - 140
        part = room if n > 6000 or r.random() < 0.4 else min(room, r.randint(350, 2000))
        power = r.choice([2.0, 2.0, r.uniform(1.5, 2.6)])
        total = int(part / 2.6)
        weights = np.arange(1, 1000, dtype=float) ** -power
        counts = (total * weights / weights.sum()).astype(int)
        counts = counts[counts > 0]
        if len(counts) < 4 or counts[3] >= counts[2]:
            break
        coded = mk.different(len(counts) - 1, lambda: mk.letters(6, "abcdefghijklmnopqrstuvwxyz"))
        ids = [mk.enc(" ....")] + [mk.value_ids(w) for w in coded]
        size = sum(int(c) * len(i) for c, i in zip(counts, ids))
        if size > part:
            counts = (counts * (part / size)).astype(int)
        if len(counts) < 5 or not counts[1] > counts[2] > counts[3] > counts[4]:
            break
        order = np.repeat(np.arange(len(counts)), counts)
        mk.np.shuffle(order)
        tape.add(mk.enc(CODED), NONE).add([t for i in order.tolist() for t in ids[i]], NONE)
        tape.add(mk.enc(CODED_QUESTION), NONE)
        tape.add(ids[1] + ids[2] + ids[3] + mk.enc("\n\n"), ANSWER)
        if part == room:
            break
    return tape if len(tape) > n // 4 else None


def counting(mk, n):
    """how often a word occurs in a short list; several lists"""
    tape = Tape()
    while n - len(tape) > 300 and len(tape) < 4000:
        words = mk.different(mk.r.randint(3, 8), mk.word)
        times = [mk.r.randint(1, 9) for _ in words]
        entries = [w for w, t in zip(words, times) for _ in range(t)]
        mk.r.shuffle(entries)
        block = Tape().add(mk.enc("List:"), NONE).add([i for w in entries for i in mk.value_ids(w)], NONE)
        block.add(mk.enc(".\n"), NONE)
        for w, t in zip(words, times):
            block.add(mk.enc("How often does the list have") + mk.value_ids(w) + mk.enc("?"), NONE)
            block.add(mk.number_ids(str(t)), ANSWER).add(mk.enc(".\n"), ANSWER)
        if len(tape) + len(block) > n:
            break
        tape.join(block)
    return tape if len(tape) else None


TASKS = dict(passkey=passkey, needles=needles, keyed=keyed, mk2=words_to_numbers, mk3=uuids_to_uuids, json=json,
             vt=variables, cwe=common_words, fwe=frequent_words, count=counting)
