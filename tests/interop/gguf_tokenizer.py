#!/usr/bin/env python3
"""The tokenizer inside a GGUF file, through `sluice tokenize` and through llama.cpp: ids row by row.

  gguf_tokenizer.py SLUICE MODEL.gguf ROWS.jsonl [--rows OUT.jsonl]

ROWS.jsonl is anything that `sluice tokenize` takes; llama.cpp is given the text that was rendered, special tokens parsed,
and a start token first where the row's ids have one. --rows keeps the ids, one {"input_ids": [...]} a line, for `sluice bench
nll` and tests/bench/nll_llama.py. Exit 0: all equal. 1: some differ. 77: llama-cpp-python is not installed.
"""
import argparse
import json
import subprocess
import sys


def first_difference(a, b):
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("sluice")
    ap.add_argument("model")
    ap.add_argument("rows")
    ap.add_argument("--rows", dest="keep", help="write the ids here")
    a = ap.parse_args()
    try:
        import llama_cpp
    except ImportError:
        print("SKIPPED: llama-cpp-python is not installed", file=sys.stderr)
        return 77
    out = subprocess.run([a.sluice, "tokenize", "--model", a.model, "--add-special", "--json", a.rows], stdout=subprocess.PIPE, check=False)
    llm = llama_cpp.Llama(a.model, vocab_only=True, verbose=False)
    rows = tokens = differ = rejected = 0
    keep = open(a.keep, "w") if a.keep else None
    for line in out.stdout.decode().splitlines():
        row = json.loads(line)
        if "rejected" in row:
            rejected += 1
            print("row %d is rejected: %s" % (row["line"], row["reason"]))
            continue
        ids = row["input_ids"]
        ref = llm.tokenize(row["text"].encode(), add_bos=False, special=True)
        if ids[:1] == [llm.token_bos()] and ref[:1] != ids[:1]:
            ref = [llm.token_bos()] + ref
        rows += 1
        tokens += len(ids)
        if ids != ref:
            differ += 1
            i = first_difference(ids, ref)
            print("row %d differs at token %d: %s, llama.cpp has %s" % (row["line"], i, ids[i:i + 6], ref[i:i + 6]))
        if keep:
            keep.write(json.dumps({"input_ids": ids}) + "\n")
    print(json.dumps({"rows": rows, "tokens": tokens, "differ": differ, "rejected": rejected}))
    return 1 if differ or rejected or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
