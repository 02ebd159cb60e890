"""Text pieces as tokens with a flag per token, haystacks, and facts hidden in them.

Pieces are encoded one by one. Their borders are places where the tokenizer always starts a new token, so that the
tokens are those of the whole text, which is what a model sees in use.
"""
import json, os, random
import numpy as np

NONE, TEXT, ANSWER, BULK = 0, 1, 2, 3        # flags: no loss, text, answer, answer with a quarter of the weight
EOS = 1
NOISE = ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."]
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


class Tape:
    def __init__(self):
        self.ids, self.flags = [], []

    def add(self, ids, flag):
        """ids: a list of tokens. flag: one for all, or one per token"""
        self.ids += ids
        self.flags += flag if isinstance(flag, list) else [flag] * len(ids)
        return self

    def __len__(self):
        return len(self.ids)

    def join(self, other):
        return self.add(other.ids, other.flags)


class Source:
    """random words, numbers, names and haystacks, and their tokens"""

    def __init__(self, data, seed, split="train"):
        from tokenizers import Tokenizer
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.tok = Tokenizer.from_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer.json"))
        self.text = np.memmap(os.path.join(data, f"{split}.bin"), dtype="<u2", mode="r")
        self.words = json.load(open(os.path.join(data, "words.json")))
        self.r, self.np = random.Random(seed), np.random.default_rng(seed)
        self.cache = {}
        encoded = self.tok.encode_batch([" " + w for w in self.words], add_special_tokens=False)
        self.cache.update((" " + w, e.ids) for w, e in zip(self.words, encoded))
        self.short = [w for w, e in zip(self.words, encoded) if len(e.ids) == 1]
        self.space = self.enc(" ")
        self.digits = {str(d): self.enc(str(d))[0] for d in range(10)}
        self.newline = self.enc("\n")[0]
        strings = [self.tok.decode([i], skip_special_tokens=False) for i in range(self.tok.get_vocab_size())]
        self.vocab = len(strings)
        # tokens after which a fact may stand, with the tokens that they become if one or two line ends follow
        marks = (".", "!", "?", ":", ";", ".)")
        ends = [i for i, s in enumerate(strings) if i > 7 and (s.endswith("\n") or s in marks)]
        self.is_end = np.zeros(self.vocab, bool)
        self.is_end[ends] = True
        self.broken = [{i: self.raw(strings[i] + "\n" * n) for i in ends} for n in (1, 2)]
        self.starts_blank = np.array([s[:1] in "\n\r" for s in strings])
        self.noise = [self.line_of_noise(s) for s in NOISE]

    def raw(self, s):
        return self.tok.encode(s, add_special_tokens=False).ids

    def enc(self, s):
        """tokens of a piece, remembered if it is short"""
        ids = self.cache.get(s)
        if ids is None:
            ids = self.raw(s)
            if len(s) < 160:
                if len(self.cache) > 60000:
                    self.cache.clear()
                self.cache[s] = ids
        return ids

    def number_ids(self, digits):
        return self.space + [self.digits[d] for d in digits]

    def value_ids(self, s):
        """tokens of a space and a value"""
        return self.number_ids(s) if s.isdigit() else self.raw(" " + s) if len(s) > 12 else self.enc(" " + s)

    # -- values and names

    def number(self, n):
        return str(self.r.randrange(10 ** (n - 1), 10 ** n))

    def uuid(self):
        h = "%032x" % self.r.getrandbits(128)
        return "-".join((h[:8], h[8:12], "4" + h[13:16], self.r.choice("89ab") + h[17:20], h[20:]))

    def letters(self, n, alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        return "".join(self.r.choices(alphabet, k=n))

    def word(self):
        return self.r.choice(self.short if self.r.random() < 0.2 else self.words)

    def pair(self):
        return self.word() + "-" + self.word()

    def name(self):
        s = "".join(self.r.choice(CONSONANTS) + self.r.choice(VOWELS) for _ in range(self.r.choice([2, 3, 3])))
        return s.capitalize()

    def different(self, n, draw):
        seen = {}
        for _ in range(50 * n):
            seen[draw()] = None
            if len(seen) == n:
                break
        return list(seen)

    # -- haystacks

    def line_of_noise(self, s):
        return np.array(self.raw(s + "\n"), np.int32)

    def slice(self, n):
        o = self.r.randrange(0, len(self.text) - n - 1)
        return self.text[o:o + n].astype(np.int32)

    def sentences(self, n):
        """one line of a few sentences of the text, again and again: noise in other words"""
        s = self.slice(200)
        cut = np.flatnonzero(self.is_end[s]) + 1
        if len(cut) < 3:
            return None
        line = s[cut[0]:cut[min(len(cut) - 1, 4)]]
        line = line[line > 7]
        if len(line) < 8:
            return None
        if int(line[-1]) not in self.broken[0]:
            return None
        line = np.concatenate([line[:-1], self.broken[0][int(line[-1])]]).astype(np.int32)
        return np.tile(line, n // len(line) + 1)[:n], len(line)

    def haystack(self, n, noise):
        """n tokens and their flags. noise: probability of repeated sentences"""
        flags = np.full(n, TEXT, np.uint8)
        if self.r.random() < noise:
            made = self.sentences(n) if self.r.random() < 0.3 else None
            if made is None:
                line = self.noise[0]
                made = np.tile(line, n // len(line) + 1)[:n], len(line)
            flags[2 * made[1]:] = NONE
            return made[0], flags
        s = self.slice(n)
        s[s == EOS] = self.newline
        return s, flags

    def places(self, hay):
        """a function from a depth (0 to 1) to the place after the nearest sentence behind it"""
        found = np.flatnonzero(self.is_end[hay[:-1]] & ~self.starts_blank[hay[1:]]) + 1
        if len(found) == 0:
            found = np.array([0])
        return lambda depth: int(found[min(len(found) - 1, int(np.searchsorted(found, depth * len(hay))))])

    def insert(self, hay, flags, placed):
        """a haystack with facts: (place, order at the same place, Tape that is whole lines)"""
        out, marks, last = [], [], 0
        for p, _, fact in sorted(placed, key=lambda t: t[:2]):
            if p > last:                                  # the sentence before gets a line end
                end = self.broken[0].get(int(hay[p - 1]))
                if end is None:
                    end = [int(hay[p - 1]), self.newline]
                out += [hay[last:p - 1], np.array(end, np.int32)]
                marks += [flags[last:p - 1], np.full(len(end), flags[p - 1], np.uint8)]
            out.append(np.array(fact.ids, np.int32))
            marks.append(np.array(fact.flags, np.uint8))
            last = p
        return np.concatenate(out + [hay[last:]]), np.concatenate(marks + [flags[last:]])

    def blank_line(self, ids, flags):
        """the text with an empty line at its end"""
        end = self.broken[1].get(int(ids[-1])) or [int(ids[-1])] + self.enc("\n\n")
        return np.concatenate([ids[:-1], np.array(end, np.int32)]), np.concatenate([flags[:-1], [TEXT] * len(end)])
