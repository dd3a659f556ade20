#!/usr/bin/env python3
"""Teacher NLL as llama.cpp sees it, to set beside what `sluice` records.

    nll_llama.py MODEL.gguf ROWS.jsonl [--threads N] [--max-rows N]

ROWS.jsonl: one {"input_ids": [...]} a line. Prints one JSON line a row, {"row", "T", "nll"}, then a summary line with the mean of the
row means ("mean_row") and the mean over all tokens ("mean_token"). Needs the packages llama-cpp-python and numpy.
"""
import argparse
import json

import llama_cpp
import numpy as np


def row_nll(llm, ids):
    """Mean of -log softmax(logits[t])[ids[t+1]] over t < T-1."""
    llm.reset()
    llm.eval(ids)
    z = np.asarray(llm.scores[: len(ids) - 1], dtype=np.float64)
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    return float(np.mean(lse - z[np.arange(len(ids) - 1), ids[1:]]))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("rows")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--max-rows", type=int, default=0, help="only the first N rows, 0 = all")
    a = ap.parse_args()
    rows = [json.loads(line)["input_ids"] for line in open(a.rows) if line.strip()]
    if a.max_rows:
        rows = rows[: a.max_rows]
    longest = max(len(r) for r in rows)
    llm = llama_cpp.Llama(a.model, n_ctx=longest + 8, n_batch=512, n_threads=a.threads, n_threads_batch=a.threads,
                          logits_all=True, verbose=False)
    means, weights = [], []
    for i, ids in enumerate(rows):
        if len(ids) < 2:
            continue
        nll = row_nll(llm, ids)
        means.append(nll)
        weights.append(len(ids) - 1)
        print(json.dumps({"row": i, "T": len(ids), "nll": round(nll, 6)}), flush=True)
    print(json.dumps({"rows": len(means), "mean_row": round(float(np.mean(means)), 6),
                      "mean_token": round(float(np.average(means, weights=weights)), 6)}))


if __name__ == "__main__":
    main()
