#!/usr/bin/env python3
"""Fault matrix: each known way in which hidden states went wrong, made on purpose by a rank of a real pipeline (ipc/faults.h).

For each fault: the command ends with status 1, the rows it touched are rejected with the verdict that names it and kept
in quarantine/, nothing of them is in hidden_states/, every other row is written, and is byte for byte what an
undisturbed run writes.

Then a row gets another verdict than in a life that was killed between publishing and committing it: it is in the folder of
the new verdict and no longer in that of the old one.

usage: fault_matrix.py --bin BUILD_DIR --model tests/golden/smollm.  77: the programs or the model are not there."""

import argparse
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

from common import private_sockets

# fault: (verdict, whole batch?), from ipc/faults.h. Rows of one batch are consecutive.
FAULTS = {
    "flatten": ("SHAPE", True), "lost-dim": ("SHAPE", True), "missing-shard": ("MISSING_SHARD", None),
    "wrong-place": ("ORDER", None), "layers-swapped": ("ORDER", True), "wrong-offset": ("CHECKSUM", None),
    "nan": ("NONFINITE", False), "zeros": ("CONSTANT", False), "previous": ("CONSTANT", None),
    "diverge": ("RANKS_DISAGREE", True), "changed": ("CHECKSUM", False),
}
ROWS, BATCH = 40, 128
WAIT = 900  # seconds; only to end a run that hangs


def files_in(d):
    return sorted(os.listdir(d)) if os.path.isdir(d) else []


def files_of(store):
    d = os.path.join(store, "hidden_states")
    return {n: open(os.path.join(d, n), "rb").read() for n in files_in(d)}


def rejected_of(store):
    path = os.path.join(store, "rejected.jsonl")
    return {j["row"]: j["reason"] for j in map(json.loads, open(path))} if os.path.exists(path) else {}


def tail(path, n=25):
    """The last lines of a log, and what stands beside it when there is none: what to look at when something is wrong."""
    if not os.path.exists(path):
        return f"      no {path}; its folder holds {files_in(os.path.dirname(path))}"
    return "".join("      " + x[:300] for x in open(path, errors="replace").readlines()[-n:])


class Matrix:
    def __init__(self, a):
        self.sluice = os.path.join(os.path.abspath(a.bin), "tools", "sluice")
        self.model, self.only, self.bad, self.ran = a.model, a.only, 0, 0
        self.work = tempfile.mkdtemp(prefix="sltest-faults-")
        private_sockets(self.work)
        self.rows = os.path.join(self.work, "rows.jsonl")
        rng = random.Random(7)
        vocab = json.load(open(os.path.join(a.model, "config.json")))["vocab_size"]
        lengths = [rng.choice([5, 17, 40, 61]) for _ in range(ROWS)]
        with open(self.rows, "w") as f:
            for n in lengths:
                f.write(json.dumps({"input_ids": [rng.randrange(vocab) for _ in range(n)]}) + "\n")
        batches, used = [[]], 0  # the packing rule: in order, until the budget is exceeded
        for i, n in enumerate(lengths):
            if used + n > BATCH:
                batches.append([])
                used = 0
            batches[-1].append(i)
            used += n
        self.target = set(batches[2])

    def out(self, name):
        return os.path.join(self.work, name.replace(", ", "-").replace(" ", "-"))

    def command(self, out, *extra):
        return [self.sluice, "extract", "-m", self.model, "-i", self.rows, "-o", out, "--tp", "2", "--threads", "1",
                "--layers", "0,n/2,n", "--layout", "files", "--codec", "none", "--batch-tokens", str(BATCH),
                "--set", "batch.chunk_tokens=32", "--json", *extra]

    def extract(self, out, *extra):
        """A whole run: what it said is kept beside its store, and a run that hangs is a failure like others."""
        with open(out + ".said", "w") as said:
            try:
                r = subprocess.run(self.command(out, *extra), stdout=subprocess.PIPE, stderr=said, text=True, timeout=WAIT)
            except subprocess.TimeoutExpired:
                return f"no end after {WAIT} s", ""
        return r.returncode, r.stdout

    def judge(self, name, wrong, good=""):
        self.ran += 1
        self.bad += bool(wrong)
        if wrong and not os.path.exists(self.rows):
            wrong.insert(0, f"somebody has removed what was in {self.work} while the test ran")
        print(f"{'FAIL ' if wrong else 'ok   '} {name}{': ' + good if good else ''}{': ' + '; '.join(wrong) if wrong else ''}", flush=True)
        if wrong:
            print(f"      its last words:\n{tail(self.out(name) + '.said', 8)}      the end of its log:\n"
                  f"{tail(os.path.join(self.out(name), 'sluice.log'))}", flush=True)
        return not wrong

    def reference(self):
        out = self.out("reference")
        rc, said = self.extract(out)
        self.ref, wrong = files_of(out), []
        if rc != 0:
            wrong.append(f"status {rc} instead of 0: {said[-300:]}")
        if len(self.ref) != ROWS:
            wrong.append(f"{len(self.ref)} files of {ROWS}; {self.work} holds {files_in(self.work)}, the store {files_in(out)}")
        return self.judge("reference", wrong, f"{len(self.ref)} files")

    def fault(self, name, verdict, whole):
        out, wrong = self.out(name), []
        rc, _ = self.extract(out, "--set", f"test.fault={name}", "--set", "test.fault_rank=1", "--set", "test.fault_batch=2")
        got, rejected = files_of(out), rejected_of(out)
        lost = {i for i in range(ROWS) if f"hs_{i}.safetensors" not in got}
        if rc != 1:
            wrong.append(f"status {rc} instead of 1")
        if set(rejected.values()) != {verdict}:
            wrong.append(f"verdicts {rejected} instead of {verdict}")
        if not rejected or not set(rejected) <= self.target:
            wrong.append(f"rows {sorted(rejected)} rejected, the fault was in {sorted(self.target)}")
        if whole is True and set(rejected) != self.target or whole is False and len(rejected) != 1:
            wrong.append(f"{len(rejected)} of {len(self.target)} rows of the batch rejected")
        if lost != set(rejected):
            wrong.append(f"files missing {sorted(lost)}, rejected {sorted(rejected)}")
        if any(got[n] != self.ref.get(n) for n in got):
            wrong.append(f"written rows differ from the undisturbed run: {[n for n in got if got[n] != self.ref.get(n)]}")
        kept = files_in(os.path.join(out, "quarantine"))
        if sum(n.endswith(".json") for n in kept) != len(rejected):
            wrong.append(f"quarantine holds {kept}")
        self.judge(name, wrong, f"{len(rejected)} rows {verdict}")

    def changed(self, name, before, after):
        """The writer dies between publishing and committing; then everything does; then the row gets another verdict."""
        out, wrong = self.out(name), []
        crash = os.path.join(out, ".crash", "writer.before_commit")
        with open(out + ".said", "w") as said:
            p = subprocess.Popen(self.command(out, *before, "--set", "test.crash_points=writer.before_commit:1", "--set",
                                              "supervise.backoff_min=1h", "--set", "supervise.backoff_max=1h"),
                                 stdout=said, stderr=said)
        end = time.monotonic() + WAIT
        while time.monotonic() < end and p.poll() is None and not os.path.exists(crash):
            time.sleep(0.02)
        if not os.path.exists(crash):
            wrong.append(f"the writer never came to its commit; the command's status: {p.poll()}")
        p.kill()
        p.wait()
        wait_gone(out, wrong)
        left = {n.split(".")[0] for d in ("hidden_states", "quarantine") for n in files_in(os.path.join(out, d))}
        if not left:
            wrong.append("nothing was published by the first life")
        if wrong:
            return self.judge(name, wrong)
        rc, said = self.extract(out, *after)
        good, kept = ({n.split(".")[0] for n in files_in(os.path.join(out, d))} for d in ("hidden_states", "quarantine"))
        if rc != (1 if after else 0) or '"verify_faults":0' not in said:
            wrong.append(f"status {rc}: {said[-300:]}")
        if good & kept or len(good | kept) != ROWS or len(kept) != (1 if after else 0):
            wrong.append(f"{len(good)} files, quarantine {sorted(kept)}, in both {sorted(good & kept)}")
        return self.judge(name, wrong, f"{len(left)} rows published before")


def wait_gone(out, wrong):
    """The daemon dies with its parent, a moment later, and its stages with it; the next life must not meet the store's lock."""
    path, end = os.path.join(out, "sluiced.lock"), time.monotonic() + WAIT
    if not os.path.exists(path):
        return
    with open(path, "r+") as f:
        while time.monotonic() < end:
            try:
                return fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(0.02)
    wrong.append("sluiced survived its parent")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--only", default="")
    a = ap.parse_args()
    if not os.path.exists(os.path.join(a.bin, "tools", "sluice")) or not os.path.exists(os.path.join(a.model, "config.json")):
        print("SKIP: the programs or the model are not there")
        return 77
    m = Matrix(a)
    if m.reference():
        for name, (verdict, whole) in FAULTS.items():
            if a.only in name:
                m.fault(name, verdict, whole)
        nan = ["--set", "test.fault=nan", "--set", "test.fault_rank=1", "--set", "test.fault_batch=0"]
        for name, before, after in (("good, then rejected", [], nan), ("rejected, then good", nan, [])):
            if a.only in name:
                m.changed(name, before, after)
    print(f"{m.ran} runs (the reference, {len(FAULTS)} faults, 2 changed verdicts), {m.bad} failed")
    if not m.bad:
        shutil.rmtree(m.work, ignore_errors=True)
    else:
        print(f"kept: {m.work}")
    return 1 if m.bad else 0


if __name__ == "__main__":
    sys.exit(main())
