#!/usr/bin/env python3
"""Very long rows through the pipeline.

    long_rows.py SLUICE GOLDEN/FAMILY [LENGTH]

One batch holds a row of LENGTH tokens (16384), a row of one token, and a row as long as the model has positions. States are causal:
of each row the beginning must be what the beginning alone gives, up to the last token that is compared, and the row of one token
what it is on its own (f32, relative error 1e-5); rows end with a token of their own, so that a row cut short or
mixed with another shows. Then LENGTH is refused by reason where max_length does not allow it. Exit 0, 1.
"""
import array
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

HEAD = 300


def load(path):
    raw = open(path, "rb").read()
    (n,) = struct.unpack_from("<Q", raw)
    t = json.loads(raw[8:8 + n])
    out = {}
    for name, kind in (("hidden_states", "f"), ("token_ids", "q")):
        a = array.array(kind)
        lo, hi = t[name]["data_offsets"]
        a.frombytes(raw[8 + n + lo:8 + n + hi])
        out[name] = a
    return t["hidden_states"]["shape"], out["hidden_states"], list(out["token_ids"])


def extract(sluice, model, rows, out, *more):
    path = out + ".jsonl"
    with open(path, "w") as f:
        for ids in rows:
            f.write(json.dumps({"input_ids": ids}) + "\n")
    r = subprocess.run([sluice, "extract", "--model", model, "--input", path, "--output", out, "--layers", "all", "--layout", "files",
                        "--precision", "f32", "--backend", "cpu", "--json", *more], stdout=subprocess.PIPE, check=False, timeout=900)
    return r.returncode, [os.path.join(out, "hidden_states", "hs_%d.safetensors" % i) for i in range(len(rows))]


def worst(a, b, tokens, width):
    """Largest relative error of a token's state."""
    bad = 0.0
    for t in range(tokens):
        for at in range(t * len(width) * width[0], (t + 1) * len(width) * width[0], width[0]):
            num = sum((x - y) ** 2 for x, y in zip(a[at:at + width[0]], b[at:at + width[0]]))
            den = sum(y * y for y in b[at:at + width[0]])
            if not math.isfinite(num):
                return math.inf
            bad = max(bad, math.sqrt(num / max(den, 1e-30)))
    return bad


def main():
    sluice, model = sys.argv[1:3]
    length = int(sys.argv[3]) if len(sys.argv) > 3 else 16384
    config = json.load(open(os.path.join(model, "config.json")))
    config = config.get("text_config", config)
    vocab, positions = config["vocab_size"], config["max_position_embeddings"]
    rng = random.Random(5)
    rows = [[rng.randrange(vocab) for _ in range(n)] for n in (length, 1, positions)]
    total, most = sum(map(len, rows)), max(map(len, rows))
    failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        big = ("--max-length", str(most), "--batch-tokens", str(total))
        rc, whole = extract(sluice, model, rows, os.path.join(tmp, "whole"), *big)
        rc2, alone = extract(sluice, model, [r[:HEAD] for r in rows], os.path.join(tmp, "alone"))
        if rc or rc2:
            print("extract gave %d and %d" % (rc, rc2))
            return 1
        for i, ids in enumerate(rows):
            (T, K, H), states, said = load(whole[i])
            _, ref, _ = load(alone[i])
            err = worst(states, ref, min(T, HEAD), [H] * K)
            tail = all(math.isfinite(x) for x in states) and any(states[-H:])
            ok = T == len(ids) and said == ids and err <= 1e-5 and tail
            failed += not ok
            print("row of %d tokens (%d positions): %s, first %d states differ by %.2g" %
                  (len(ids), positions, "ok" if ok else "WRONG", min(T, HEAD), err))
        rc, _ = extract(sluice, model, rows[:2], os.path.join(tmp, "short"), "--overlong", "skip")
        rejected = [json.loads(x) for x in open(os.path.join(tmp, "short", "rejected.jsonl"))]
        ok = rc == 1 and len(rejected) == 1 and "TOO_LONG" in json.dumps(rejected[0])
        failed += not ok
        print("above max_length: exit %d, %s" % (rc, json.dumps(rejected[:2])))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
