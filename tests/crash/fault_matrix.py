#!/usr/bin/env python3
"""Fault matrix: each known way in which hidden states went wrong, made on purpose by a rank of a real pipeline (ipc/faults.h).

For each fault: the command ends with status 1, the rows it touched are rejected with the verdict that names it and kept
in quarantine/, nothing of them is in hidden_states/, every other row is written, and is byte for byte what an
undisturbed run writes.

Then a row gets another verdict than in a life that was killed between publishing and committing it: it is in the folder of
the new verdict and no longer in that of the old one.

usage: fault_matrix.py --bin BUILD_DIR --model tests/golden/smollm.  77: the programs or the model are not there."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

# fault: (verdict, whole batch?), from ipc/faults.h. Rows of one batch are consecutive.
FAULTS = {
    "flatten": ("SHAPE", True), "lost-dim": ("SHAPE", True), "missing-shard": ("MISSING_SHARD", None),
    "wrong-place": ("ORDER", None), "layers-swapped": ("ORDER", True), "wrong-offset": ("CHECKSUM", None),
    "nan": ("NONFINITE", False), "zeros": ("CONSTANT", False), "previous": ("CONSTANT", None),
    "diverge": ("RANKS_DISAGREE", True), "changed": ("CHECKSUM", False),
}
ROWS, BATCH = 40, 128


def files_of(store):
    d = os.path.join(store, "hidden_states")
    return {n: open(os.path.join(d, n), "rb").read() for n in sorted(os.listdir(d))}


def files_in(d):
    return sorted(os.listdir(d)) if os.path.isdir(d) else []


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--only", default="")
    a = ap.parse_args()
    sluice = os.path.join(os.path.abspath(a.bin), "tools", "sluice")
    if not os.path.exists(sluice) or not os.path.exists(os.path.join(a.model, "config.json")):
        print("SKIP: the programs or the model are not there")
        return 77
    work = tempfile.mkdtemp(prefix="sluice-faults-")
    rows = os.path.join(work, "rows.jsonl")
    rng = random.Random(7)
    vocab = json.load(open(os.path.join(a.model, "config.json")))["vocab_size"]
    lengths = [rng.choice([5, 17, 40, 61]) for _ in range(ROWS)]
    with open(rows, "w") as f:
        for n in lengths:
            f.write(json.dumps({"input_ids": [rng.randrange(vocab) for _ in range(n)]}) + "\n")
    batches, used = [[]], 0  # the packing rule: in order, until the budget is exceeded
    for i, n in enumerate(lengths):
        if used + n > BATCH:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += n
    target = set(batches[2])

    def command(out, *extra):
        return [sluice, "extract", "-m", a.model, "-i", rows, "-o", out, "--tp", "2", "--threads", "1",
                "--layers", "0,n/2,n", "--layout", "files", "--codec", "none", "--batch-tokens", str(BATCH),
                "--set", "batch.chunk_tokens=32", "--json", *extra]

    def extract(out, *extra):
        return subprocess.run(command(out, *extra), capture_output=True, text=True, timeout=60)

    r = extract(os.path.join(work, "reference"))
    if r.returncode:
        print(f"FAIL: the undisturbed run ended with {r.returncode}\n{r.stderr[-2000:]}")
        return 1
    ref = files_of(os.path.join(work, "reference"))
    bad = 0
    for fault, (verdict, whole) in FAULTS.items():
        if a.only and a.only not in fault:
            continue
        out, wrong = os.path.join(work, fault), []
        r = extract(out, "--set", f"test.fault={fault}", "--set", "test.fault_rank=1", "--set", "test.fault_batch=2")
        got, rejected = files_of(out), {}
        if os.path.exists(out + "/rejected.jsonl"):
            for line in open(out + "/rejected.jsonl"):
                j = json.loads(line)
                rejected[j["row"]] = j["reason"]
        lost = {i for i in range(ROWS) if f"hs_{i}.safetensors" not in got}
        if r.returncode != 1:
            wrong.append(f"status {r.returncode} instead of 1")
        if set(rejected.values()) != {verdict}:
            wrong.append(f"verdicts {rejected} instead of {verdict}")
        if not rejected or not set(rejected) <= target:
            wrong.append(f"rows {sorted(rejected)} rejected, the fault was in {sorted(target)}")
        if whole is True and set(rejected) != target or whole is False and len(rejected) != 1:
            wrong.append(f"{len(rejected)} of {len(target)} rows of the batch rejected")
        if lost != set(rejected):
            wrong.append(f"files missing {sorted(lost)}, rejected {sorted(rejected)}")
        if any(got[n] != ref.get(n) for n in got):
            wrong.append("a written row differs from the undisturbed run")
        kept = os.listdir(out + "/quarantine") if os.path.isdir(out + "/quarantine") else []
        if sum(n.endswith(".json") for n in kept) != len(rejected):
            wrong.append(f"quarantine holds {sorted(kept)}")
        print(f"{'FAIL ' if wrong else 'ok   '} {fault}: {len(rejected)} rows {verdict}{': ' + '; '.join(wrong) if wrong else ''}")
        bad += bool(wrong)
    nan = ["--set", "test.fault=nan", "--set", "test.fault_rank=1", "--set", "test.fault_batch=0"]
    for before, after in (([], nan), (nan, [])):
        name = "good, then rejected" if after else "rejected, then good"
        if a.only and a.only not in name:
            continue
        out, wrong = os.path.join(work, name.replace(", ", "-").replace(" ", "-")), []
        crash = os.path.join(out, ".crash", "writer.before_commit")
        p = subprocess.Popen(command(out, *before, "--set", "test.crash_points=writer.before_commit:1", "--set",
                                     "supervise.backoff_min=1m", "--set", "supervise.backoff_max=1m"),
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while time.monotonic() < end and not os.path.exists(crash):
            time.sleep(0.02)
        p.kill()
        p.wait()
        left = {n.split(".")[0] for d in ("hidden_states", "quarantine") for n in files_in(os.path.join(out, d))}
        for _ in range(100):  # the daemon dies with its parent, a moment later
            r = extract(out, *after)
            if r.returncode != 75:
                break
            time.sleep(0.1)
        good, kept = ({n.split(".")[0] for n in files_in(os.path.join(out, d))} for d in ("hidden_states", "quarantine"))
        if not left or r.returncode != (1 if after else 0) or '"verify_faults":0' not in r.stdout:
            wrong.append(f"status {r.returncode}, {sorted(left)} left by the first life: {r.stdout[-300:]} {r.stderr[-300:]}")
        if good & kept or len(good | kept) != ROWS or len(kept) != (1 if after else 0):
            wrong.append(f"{len(good)} files, quarantine {sorted(kept)}, in both {sorted(good & kept)}")
        print(f"{'FAIL ' if wrong else 'ok   '} {name}{': ' + '; '.join(wrong) if wrong else ''}")
        bad += bool(wrong)
    print(f"{len(FAULTS)} faults and 2 changed verdicts, {bad} not handled")
    if not bad:
        shutil.rmtree(work, ignore_errors=True)
    else:
        print(f"kept: {work}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
