#!/usr/bin/env python3
"""Gather the training text, and encode it.

    make_data.py gather --debs UN --rust-doc .../share/doc/rust/html --haystack ../passkey.jsonl --out DATA
    make_data.py encode --out DATA [--jobs 16]

`gather` reads a folder with unpacked Debian 12 packages, one sub-folder per package (`apt-get download PKG &&
dpkg-deb -x PKG_*.deb UN/PKG`), and the documentation of a Rust toolchain. It writes train.txt and valid.txt (documents
separated by a zero byte), valid_docs.json, sources.json and words.json, the key words of the synthetic samples.
`encode` writes train.bin and valid.bin (little-endian uint16 token ids, documents end with <|eos|>) with the tokenizer
of this folder.

Everything is deterministic. A document goes to the validation side if the CRC32 of its text modulo 33 is 0 (about 3 %).
The evaluation (crates/s2o-eval) hides its facts in the text of passkey.jsonl and takes its words from that text. So the
training text has no line of that text, and words.json has none of its words.
"""
import argparse, gzip, html, json, multiprocessing, os, re, subprocess, zlib
from collections import Counter
from pathlib import Path

MB = 1_000_000
# name, licence (as the package's own copyright file states it), sub-path, kind, path filter, cap in bytes
SOURCES = [
    ("bible-kjv", "public domain text (package: GPL-2+)", "bible", None, None, 5 * MB),
    ("dict-gcide", "GPL-1+/GPL-2 (GNU Collaborative International Dictionary of English)", "dict", "gcide", None,
     26 * MB),
    ("dict-foldoc", "GFDL-1.2 (Free On-line Dictionary of Computing)", "dict", "foldoc", None, 6 * MB),
    ("dict-jargon", "public domain (The Jargon File)", "dict", "jargon", None, 2 * MB),
    ("dict-devil", "public domain (The Devil's Dictionary)", "dict", "devil", None, 1 * MB),
    ("wordnet-base", "WordNet 3.0 licence", "wordnet", None, None, 12 * MB),
    ("anarchism", "GPL-2 (An Anarchist FAQ)", "html", r"/html/[^/]*\.html", None, 9 * MB),
    ("debian-handbook", "GPL-2+ or CC-BY-SA-3.0", "html", r"/en-US/.*\.html", None, 4 * MB),
    ("debian-reference-en", "GPL-2+", "html", r"\.html", None, 3 * MB),
    ("debian-faq", "GPL-2+", "html", r"\.en\.html|\.html", None, 2 * MB),
    ("developers-reference", "GPL-2+", "html", r"\.html", None, 2 * MB),
    ("debian-policy", "GPL-2+", "html", r"\.html", None, 3 * MB),
    ("debian-history", "GPL-2+", "html", r"\.en\.html|history/[^/]*\.html", None, 1 * MB),
    ("installation-guide-amd64", "GPL-2", "html", r"/en/.*\.html", None, 3 * MB),
    ("gnome-user-docs", "CC-BY-SA-3.0", "html", r"/help/C/.*\.(page|xml|docbook)", None, 3 * MB),
    ("libreoffice-help-en-us", "MPL-2.0", "html", r"/en-US/.*\.html", None, 8 * MB),
    ("linux-doc-6.1", "GPL-2", "text", r"\.(rst|txt)\.gz|\.rst|Documentation/.*\.txt",
     r"translations|devicetree|/html/", 22 * MB),
    ("manpages", "GPL-2+, Linux man-pages copyleft and others (free)", "man", r"man[1-8]/.*\.gz", None, 3 * MB),
    ("manpages-dev", "GPL-2+, Linux man-pages copyleft and others (free)", "man", r"man[1-8]/.*\.gz", None, 6 * MB),
    ("perl-doc", "GPL-1+ or Artistic", "pod", r"\.pod", r"perl(ko|jp|cn|tw)\.pod", 9 * MB),
    ("postgresql-doc-15", "PostgreSQL licence", "html", r"\.html", None, 9 * MB),
    ("python3.11-doc", "PSF-2", "text", r"_sources/.*\.txt", r"changelog", 11 * MB),
    ("python-django-doc", "BSD-3-Clause", "html", r"\.html", r"genindex|modindex|_modules", 8 * MB),
    ("sqlite3-doc", "public domain", "html", r"\.html", None, 7 * MB),
    ("apache2-doc", "Apache-2.0", "html", r"\.html\.en|/en/.*\.html", None, 5 * MB),
    ("git-doc", "GPL-2", "text", r"\.txt", None, 4 * MB),
    ("octave-doc", "GPL-3+", "html", r"octave\.html/.*\.html", None, 3 * MB),
    ("maxima-doc", "GPL-2", "html", r"html/[^/]*\.html|/maxima[^/]*\.html", r"/(de|es|pt|pt_BR|ja|ru)/", 4 * MB),
    ("vim-runtime", "Vim licence (GPL-compatible)", "text", r"/doc/.*\.txt", None, 7 * MB),
    ("aptitude-doc-en", "GPL-2+", "html", r"\.html", None, 2 * MB),
    ("zsh-doc", "Zsh licence (MIT-like)", "html", r"\.html", None, 2 * MB),
    ("mutt", "GPL-2+", "html", r"manual.*\.html", None, 1 * MB),
    ("rust-doc", "MIT or Apache-2.0 (Rust books and library documentation)", "rust", None, None, 24 * MB),
]
RUST_DIRS = ["book", "rust-by-example", "reference", "nomicon", "cargo", "rustc", "rustdoc", "edition-guide",
             "embedded-book", "unstable-book", "clippy", "style-guide", "error_codes", "std/"]
STOP = set("the of to and a in is that for it as be on with this are or by an if not can from which you".split())
QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2010": "-", "\u2011": "-",
                        "\u2013": "-", "\u2014": "-", "\u00a0": " ", "\u2026": "...", "\u2212": "-", "\ufeff": "",
                        "\u00ad": "", "\u200b": ""})


def read(p):
    b = gzip.open(p, "rb").read() if str(p).endswith(".gz") else p.read_bytes()
    return b.decode("utf-8", "replace")


DROP = re.compile(r"(?is)<(script|style|nav|head|footer|svg|select|button|noscript)\b.*?</\1>|<!--.*?-->")
BLOCK = re.compile(r"(?i)</?(p|div|h[1-6]|li|ul|ol|tr|table|pre|dt|dd|dl|br|section|blockquote|title|page|note|item|"
                   r"para|simpara)\b[^>]*>")


def html_text(s, main=None):
    if main:
        m = re.search(main, s)
        if m:
            s = s[m.start():]
    s = DROP.sub(" ", s)
    s = re.sub(r"(?i)</t[dh]>", "  ", s)
    keep = []

    def stash(m):
        keep.append(re.sub(r"<[^>]*>", "", m.group(0)))
        return "\n\x00%d\x00\n" % (len(keep) - 1)
    s = re.sub(r"(?is)<pre\b.*?</pre>", stash, s)
    s = re.sub(r"\s+", " ", s)
    s = BLOCK.sub("\n", s)
    s = re.sub(r"<[^>]*>", "", s)
    s = re.sub(r"\x00(\d+)\x00", lambda m: keep[int(m.group(1))], s)
    return html.unescape(s)


def clean(s):
    s = s.translate(QUOTES).replace("\r", "").replace("\t", "    ")
    s = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]", "", s)
    s = "\n".join(l.rstrip() for l in s.split("\n"))
    s = re.sub(r"([=\-_*~#.^+]{4})[=\-_*~#.^+]+", r"\1", s)
    s = re.sub(r"\n{3,}", "\n\n", s)
    s = re.sub(r"(?<=\S) {3,}", "  ", s)
    return s.strip()


def unwrap(s):
    """join hard-wrapped prose lines of a plain-text file"""
    out = []
    for para in s.split("\n\n"):
        ls = para.split("\n")
        marked = any(l.startswith((" ", "|", "+", "-", "*", "#")) for l in ls)
        if len(ls) > 1 and all(len(l) > 50 for l in ls[:-1]) and not marked:
            para = " ".join(l.strip() for l in ls)
        out.append(para)
    return "\n\n".join(out)


def good(s):
    if len(s) < 400:
        return False
    sample = s[:20000]
    if sum(c < "\x7f" for c in sample) / len(sample) < 0.985:
        return False
    if sum(c.isalpha() or c in " ,.\n" for c in sample) / len(sample) < 0.74:
        return False
    w = re.findall(r"[a-z]+", sample.lower())
    return len(w) > 50 and sum(x in STOP for x in w) / len(w) > 0.12


def docs(name, kind, arg, skip, debs, rust):
    root = Path(debs) / name
    if kind == "rust":
        for d in RUST_DIRS:
            base = Path(rust) / d
            for p in sorted(base.rglob("*.html")):
                rel = str(p.relative_to(rust))
                if p.name in ("print.html", "toc.html", "all.html", "404.html"):
                    continue
                if rel.startswith(("std/arch", "std/simd", "std/intrinsics")):
                    continue
                s = read(p)
                if d.startswith("std"):   # only the prose of the API pages
                    s = "\n".join(re.findall(r'(?s)<div class="docblock">.*?</div>', s))
                yield clean(html_text(s, r"<main\b"))
    elif kind == "bible":
        exe = str(Path(debs) / "bible-kjv/usr/bin/bible")
        lib = str(Path(debs) / "bible-kjv-text/usr/lib")
        books = subprocess.run([exe, "-p", lib, "-l10000", "gen1:1-rev22:21"], capture_output=True, text=True,
                               timeout=120).stdout
        for part in re.split(r"\n(?=\S[^\n]* \d+\n)", books):
            yield clean(re.sub(r"\n\n+", "\n", part))
    elif kind == "dict":
        s = gzip.open(root / f"usr/share/dictd/{arg}.dict.dz", "rb").read().decode("utf-8", "replace")
        s = re.sub(r"[{}\\]", "", s)
        s = re.sub(r"\n {3,}(?=\S)", " ", s)          # unwrap the indented entries
        s = re.sub(r" \[1913 Webster\]| \[PJC\]| \[WordNet 1\.5\]", "", s)
        s = clean(s)
        for i in range(0, len(s), 30000):             # 30 kB "documents"
            yield s[i:i + 30000]
    elif kind == "wordnet":
        out = []
        for pos in ("noun", "verb", "adj", "adv"):
            for l in read(root / f"usr/share/wordnet/data.{pos}").split("\n"):
                if l.startswith("  ") or " | " not in l:
                    continue
                f = l.split(" ")
                n = int(f[3], 16)
                ws = [f[4 + 2 * i].replace("_", " ") for i in range(n)]
                meaning = l.split(" | ", 1)[1].strip().replace("; ", ". ").rstrip(".")
                out.append("%s: %s." % (", ".join(re.sub(r"\(.*", "", w) for w in ws), meaning))
        for i in range(0, len(out), 300):
            yield clean("\n".join(out[i:i + 300]))
    else:
        for p in sorted(root.rglob("*")):
            rel = "/" + str(p.relative_to(root))
            wanted = re.search("(?:%s)$" % arg, rel) and not (skip and re.search(skip, rel))
            if not p.is_file() or p.is_symlink() or not wanted:
                continue
            if kind == "html":
                yield clean(html_text(read(p), r"<body\b"))
            elif kind == "text":
                yield clean(unwrap(read(p)))
            elif kind == "man":
                t = subprocess.run(["groff", "-man", "-Tutf8", "-P-cbou", "-rLL=2000n", "-rHY=0"],
                                   input=read(p).encode(), capture_output=True).stdout
                yield clean(re.sub(r"\n {5,}", "\n", t.decode("utf-8", "replace")))
            elif kind == "pod":
                t = subprocess.run(["pod2text", "-w", "2000", "-i", "2", str(p)], capture_output=True).stdout
                yield clean(t.decode("utf-8", "replace"))


def haystack(path):
    """the text in which the evaluation hides its facts"""
    bodies = []
    for record in map(json.loads, open(path, encoding="utf-8")):
        body = record["input"].split("\n", 1)[1].rsplit("\n\nWhat is the ", 1)[0]
        bodies.append("\n".join(l for l in body.split("\n")
                                if not l.startswith(("The pass key is ", "The special magic number for "))))
    return "\n".join(bodies)


def key_words(train, banned, tok):
    """lower-case English words that the evaluation does not use, most frequent first, at most 5 tokens each"""
    counts = Counter(w for _, s in train for w in re.findall(r"(?<= )[a-z]{3,13}(?=[ ,.;])", s))
    words = [w for w, n in counts.most_common(60000) if n >= 8 and w not in banned and len(set(w)) > 1]
    encoded = tok.encode_batch([" " + w for w in words], add_special_tokens=False)
    return [w for w, e in zip(words, encoded) if len(e.ids) <= 5][:16000]


def gather(a):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
    hay = haystack(a.haystack)
    hay_lines = {l.strip() for l in hay.split("\n") if len(l) > 40}
    banned = {w for w in re.split(r"[^A-Za-z0-9]", hay) if re.fullmatch("[a-z]{5,9}", w)}
    seen, train, valid, table, dropped = set(), [], [], [], 0
    for name, lic, kind, arg, skip, cap in SOURCES:
        n = nd = nv = 0
        for s in docs(name, kind, arg, skip, a.debs, a.rust_doc):
            keep = []
            for para in s.split("\n"):                # drop long lines seen before (boilerplate, copies)
                if len(para) > 60:
                    h = zlib.crc32(para.encode()) << 32 | zlib.adler32(para.encode())
                    if h in seen:
                        continue
                    seen.add(h)
                keep.append(para)
            s = re.sub(r"\n{3,}", "\n\n", "\n".join(keep)).strip()
            if not good(s):
                continue
            if n > cap:
                break
            n += len(s)
            nd += 1
            if zlib.crc32(s.encode()) % 33 == 0:
                nv += 1
                valid.append((name, s))
            else:
                lines = s.split("\n")
                kept = [l for l in lines if l.strip() not in hay_lines]
                dropped += len(lines) - len(kept)
                train.append((name, "\n".join(kept)))
        table.append({"source": name, "licence": lic, "documents": nd, "chars": n, "valid_documents": nv})
        print(f"{name:28s} {nd:6d} docs {n / 1e6:7.2f} MB  valid {nv}", flush=True)
    for split, documents in (("train", train), ("valid", valid)):
        (Path(a.out) / f"{split}.txt").write_text("\0".join(s for _, s in documents), encoding="utf-8")
        print(split, "%.2f MB" % (sum(len(s) for _, s in documents) / 1e6))
    words = key_words(train, banned, tok)
    for name, content in (("words", words), ("sources", table), ("valid_docs", [name for name, _ in valid])):
        (Path(a.out) / f"{name}.json").write_text(json.dumps(content, indent=1 if name == "sources" else None))
    print(len(words), "key words,", len(banned), "words are the evaluation's,", dropped, "lines of its text dropped")


def encode_documents(documents):
    import numpy as np
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
    eos = tok.token_to_id("<|eos|>")
    ids = [tok.encode(s, add_special_tokens=False).ids + [eos] for s in documents]
    return np.array([i for document in ids for i in document], dtype="<u2")


def encode(a):
    import numpy as np
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for split in ("train", "valid"):
        documents = (Path(a.out) / f"{split}.txt").read_text(encoding="utf-8").split("\0")
        pieces = [documents[i:i + 64] for i in range(0, len(documents), 64)]
        with multiprocessing.Pool(a.jobs) as pool:
            ids = np.concatenate(pool.map(encode_documents, pieces, chunksize=1))
        ids.tofile(Path(a.out) / f"{split}.bin")
        print(split, ids.size, "tokens", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("step", choices=["gather", "encode"])
    ap.add_argument("--debs", help="folder of unpacked packages")
    ap.add_argument("--rust-doc")
    ap.add_argument("--haystack", help="passkey.jsonl, the text of the evaluation")
    ap.add_argument("--out", required=True)
    ap.add_argument("--jobs", type=int, default=os.cpu_count())
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    {"gather": gather, "encode": encode}[a.step](a)


if __name__ == "__main__":
    main()
