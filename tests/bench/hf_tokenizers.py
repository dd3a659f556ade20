#!/usr/bin/env python3
"""Times the PyPI package `tokenizers` on one thread, for comparison with `sluice bench tokenize` on the same file.

  hf_tokenizers.py DIR FILE [--rounds 3]

FILE is cut into texts of about 4 KiB at line ends, as the bench does. Prints one JSON object; the fastest round counts.
"""
import argparse
import json
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"


def texts_of(path, size=4096):
    data, out, at = open(path, "rb").read(), [], 0
    while at < len(data):
        end = data.find(b"\n", min(at + size, len(data)))
        end = len(data) if end < 0 else end + 1
        out.append(data[at:end].decode("utf-8"))
        at = end
    return out, len(data)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("file")
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    try:
        import tokenizers
    except ImportError as e:
        print(f"skipped: {e}", file=sys.stderr)
        return 77
    tok = tokenizers.Tokenizer.from_file(os.path.join(a.folder, "tokenizer.json"))
    texts, size = texts_of(a.file)
    best, count = None, 0
    for _ in range(a.rounds):
        start = time.perf_counter()
        count = sum(len(e.ids) for e in tok.encode_batch_fast(texts, add_special_tokens=False))
        took = time.perf_counter() - start
        best = took if best is None else min(best, took)
    print(json.dumps({"engine": f"tokenizers {tokenizers.__version__}", "bytes": size, "tokens": count, "seconds": round(best, 4),
                      "mb_per_s": round(size / best / 1e6, 3)}))
    return 0


sys.exit(main())
