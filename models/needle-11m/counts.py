"""Counting: common words of a list and frequent coded words, in the evaluation's phrasings, and short lists."""
import numpy as np
from tape import ANSWER, NONE, Tape

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
