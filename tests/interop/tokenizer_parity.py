#!/usr/bin/env python3
"""Random strings through `sluice tokenize` and through the reference packages; every difference is printed.

  tokenizer_parity.py SLUICE DIR [--count 100000] [--seed 1]

DIR is a tokenizer folder: tokenizer.json is compared with the PyPI package `tokenizers`; a folder with tiktoken.model with `tiktoken`
(the pattern is Kimi's). Exit 0: all equal. 1: some differ. 77: the package is not installed.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def reference_json(folder):
    import tokenizers
    tok = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    special = [t.content for t in tok.get_added_tokens_decoder().values()]
    return (lambda texts: [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)]), special


def reference_tiktoken(folder):
    import base64
    import tiktoken
    ranks = {}
    for line in open(os.path.join(folder, "tiktoken.model"), "rb"):
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    named = json.load(open(os.path.join(folder, "tokenizer_config.json")))["added_tokens_decoder"]
    base = len(ranks)
    special = {named.get(str(i), {}).get("content", f"<|reserved_token_{i}|>"): i for i in range(base, base + 256)}
    enc = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    return (lambda texts: [enc.encode(t, allowed_special="all") for t in texts]), list(special)


WORDS = ("the quick Brown FOX don't it's WE'LL y'all'd foo_bar camelCase HTTPServer 12345 3.14 1,000 naïve café Straße İstanbul ǅungla ﬁn "
         "привет мир 你好世界 こんにちは カタカナ 안녕하세요 สวัสดี नमस्ते مرحبا שלום ἀρχή e\u0301 a\u030a\u0323 \u1100\u1161\u11a8 ½ ² Ⅷ ٣٤ 〇 々 \u3400 \U00020000 "
         "👩‍👩‍👧 🇩🇪 'ſ 'S 'RE ## //\n /*\n ```py\n \t\tif x:\n    return  \r\n\r\n \u00a0 \u3000 \u2028 \x85 \x1c \x00 \x7f ▁ <0x0A> <|x|> \u200d \ufeff \ufffd").split(" ")
RANGES = [(0x20, 0x7F), (0x20, 0x7F), (0, 0x20), (0x80, 0x250), (0x250, 0x600), (0x600, 0x1200), (0x1200, 0x2000), (0x2000, 0x2c00),
          (0x2c00, 0x3400), (0x3400, 0xA000), (0xA000, 0xD800), (0xE000, 0xFFFE), (0x10000, 0x12000), (0x16000, 0x17000), (0x1D000, 0x20000),
          (0x20000, 0x32000), (0xE0000, 0xE0200)]


def make(rng, special):
    parts = []
    for _ in range(rng.randint(1, 14)):
        k = rng.random()
        if k < 0.45:
            parts.append(rng.choice(WORDS))
        elif k < 0.55:
            parts.append(rng.choice([" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n "]) * rng.randint(1, 4))
        elif k < 0.6 and special:
            parts.append(rng.choice(special))
        elif k < 0.65:
            parts.append(chr(rng.randrange(33, 0x3000)) * rng.randint(1, 40))
        else:
            a, b = rng.choice(RANGES)
            parts.append("".join(chr(rng.randrange(a, b)) for _ in range(rng.randint(1, 6))))
        if rng.random() < 0.5:
            parts.append(" ")
    return "".join(parts)


def ours(sluice, folder, texts):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        for t in texts:
            f.write(json.dumps({"text": t}) + "\n")
        f.flush()
        out = subprocess.run([sluice, "tokenize", "--model", folder, "--json", f.name], stdout=subprocess.PIPE)
    return [json.loads(line) for line in out.stdout.splitlines()]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("sluice")
    p.add_argument("folder")
    p.add_argument("--count", type=int, default=100000)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    try:
        load = reference_json if os.path.exists(os.path.join(a.folder, "tokenizer.json")) else reference_tiktoken
        encode, special = load(a.folder)
    except ImportError as e:
        print(f"skipped: {e}", file=sys.stderr)
        return 77
    rng, bad, done = random.Random(a.seed), 0, 0
    while done < a.count:
        texts = [make(rng, special) for _ in range(min(20000, a.count - done))]
        got, want = ours(a.sluice, a.folder, texts), encode(texts)
        if len(got) != len(texts):
            print(f"{len(got)} answers for {len(texts)} texts")
            return 1
        for t, g, w in zip(texts, got, want):
            if g.get("input_ids", [] if g.get("rejected") == "EMPTY" else None) != w:  # no tokens: no row
                bad += 1
                if bad <= 5:
                    print(json.dumps({"text": t, "ours": g.get("input_ids", g.get("rejected")), "reference": w}))
        done += len(texts)
    print(f"{a.folder}: {done} strings, {bad} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
