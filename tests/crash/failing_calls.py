#!/usr/bin/env python3
"""Failing calls: every kind of system call on the store's files fails a few times, in the middle of a run or while it starts:
no space, a quota, an I/O error, a write that takes half. So do calls that take a process, memory or a descriptor. The command still
ends with 0, having read the store back, and the store is that of a run in which nothing failed: files byte for byte, rows of
shards by the checksums of their states; nothing is rejected. Then a row of intake.dat is damaged before it is computed: the command
ends at once with 78 and names the row.

usage: failing_calls.py --bin BUILD_DIR --model tests/golden/smollm [--only WORD]
Exit 0, 1 (the store is kept and named), or 77 when the programs or the model are not there."""

import argparse
import concurrent.futures
import errno
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

from common import private_sockets

NOSPC, QUOTA, IO, HALF = errno.ENOSPC, errno.EDQUOT, errno.EIO, 0
AGAIN, MEMORY, FILES, TABLE = errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE
W, F, D = "sluice-writer", "sluice-feeder", "sluiced"
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "tiny")
WAIT = 900  # seconds; only to end a run that hangs
# (layout, or "chat": files of conversations, program, call, part of the path, errno, first call that fails, how many, what the log has to say)
CASES = [
    ("files", W, "mkdir", "/.tmp", NOSPC, 1, 2, "No space left"),
    ("files", W, "mkdir", "/hidden_states", QUOTA, 1, 1, "quota exceeded"),
    ("files", W, "open", ".st", NOSPC, 5, 9, None),
    ("files", W, "open", "/.tmp/0.st", NOSPC, 1, 4, "refuses to write"),  # (said when one row fails twice, not two once)
    ("files", W, "write", ".st", QUOTA, 3, 4, None),
    ("files", W, "write", ".st", HALF, 2, 9, None),
    ("files", W, "fdatasync", ".st", NOSPC, 3, 8, None),
    ("files", W, "fdatasync", "/.tmp/0.st", NOSPC, 1, 4, "refuses to write"),
    ("files", W, "fdatasync", ".st", IO, 3, 1, "Input/output error"),
    ("files", W, "rename", "/hs_", NOSPC, 4, 5, "refuses to write"),
    ("files", W, "fsync", "/hidden_states", IO, 1, 1, "Input/output error"),
    ("files", W, "fsync", "/hidden_states", QUOTA, 2, 4, "refuses to write"),
    ("files", W, "open-old", "/hidden_states", FILES, 5, 4, "refuses to write"),  # (the folder, to sync its names)
    ("files", W, "open", "/.tmp/0.st", FILES, 1, 4, "refuses to write"),
    ("files", W, "open", "/commit.log", QUOTA, 1, 2, "quota exceeded"),
    ("files", W, "pwrite", "/commit.log", NOSPC, 2, 4, "refuses to write"),
    ("files", W, "pwrite", "/commit.log", HALF, 2, 3, None),
    ("files", W, "fdatasync", "/commit.log", QUOTA, 2, 4, "refuses to write"),
    ("files", W, "fdatasync", "/commit.log", IO, 3, 1, "Input/output error"),
    ("files", W, "open", "/.manifest.tmp", NOSPC, 1, 1, "No space left"),
    ("files", W, "write", "/.manifest.tmp", HALF, 1, 4, None),
    ("files", W, "write", "/.manifest.tmp", IO, 2, 1, "Input/output error"),
    ("files", W, "fsync", "/.manifest.tmp", NOSPC, 2, 3, "refuses to write"),
    ("files", F, "open", "/intake.dat", QUOTA, 1, 2, "quota exceeded"),
    ("files", F, "open", "/intake.log", NOSPC, 1, 2, "No space left"),
    ("files", F, "pwrite", "/intake.dat", NOSPC, 2, 1, "intake is paused"),
    ("files", F, "pwrite", "/intake.dat", HALF, 1, 9, None),
    ("files", F, "fdatasync", "/intake.dat", QUOTA, 2, 1, "intake is paused"),
    ("files", F, "fdatasync", "/intake.dat", IO, 2, 1, "Input/output error"),
    ("files", F, "pwrite", "/intake.log", HALF, 2, 3, None),
    ("files", F, "fdatasync", "/intake.log", IO, 3, 1, "Input/output error"),
    ("shards", W, "open", ".sls", QUOTA, 1, 2, "quota exceeded"),
    ("shards", W, "fallocate", ".sls", QUOTA, 1, 4, "refuses to write"),
    ("shards", W, "ftruncate", ".sls", NOSPC, 1, 2, "No space left"),
    ("shards", W, "ftruncate", ".sls", IO, 2, 1, "Input/output error"),
    ("shards", W, "fsync", ".sls", NOSPC, 2, 1, "No space left"),
    ("shards", W, "rename", ".sls", NOSPC, 1, 1, "No space left"),
    ("shards", W, "fsync", "/shards", IO, 2, 1, "Input/output error"),
    ("chat", F, "socketpair", "-", FILES, 1, 2, "rows wait, none is rejected for this"),
    ("chat", F, "fork", "-", AGAIN, 1, 3, "rows go on"),
    ("chat", F, "fork", "-", MEMORY, 1, 1, "Cannot allocate memory"),
    ("chat", F, "execve", "/python3", MEMORY, 1, 2, "no memory, processes or open files for the template helper"),
    ("chat", F, "open-old", "/dev/null", TABLE, 1, 1, "no memory, processes or open files for the template helper"),
    ("chat", F, "open-old", "/tokenizer.json", FILES, 1, 1, "Too many open files"),
    ("chat", F, "fopen", "/tokenizer_config.json", MEMORY, 1, 2, "Cannot allocate memory"),
    ("chat", F, "fopen", "/chat_template.jinja", TABLE, 1, 1, "Too many open files in system"),
    ("files", F, "open-old", "/intake.log", FILES, 1, 1, "Too many open files"),
    ("files", F, "open-old", "/commit.log", FILES, 2, 5, "commit.log can be read again"),
    ("files", D, "open-old", "/files_sluiced_open", NOSPC, 1, 1, "the flow waits until there is"),  # a file in the store
    ("files", D, "fork", "-", AGAIN, 2, 3, "cannot be started"),
    ("files", D, "pidfd_open", "-", FILES, 3, 2, "cannot be started"),
    ("files", D, "execv", "/sluice-compute", MEMORY, 1, 2, "exec of a stage program failed"),
]


class Runs:
    def __init__(self, a):
        self.a, self.work = a, tempfile.mkdtemp(prefix="sltest-calls-")
        private_sockets(self.work)
        self.rows, self.chats = os.path.join(self.work, "rows.jsonl"), os.path.join(self.work, "chats.jsonl")
        vocab = json.load(open(os.path.join(a.model, "config.json")))["vocab_size"]
        rng = random.Random(5)
        with open(self.rows, "w") as f:
            for _ in range(40):
                f.write(json.dumps({"input_ids": [rng.randrange(vocab) for _ in range(rng.choice([1, 7, 30]))]}) + "\n")

        with open(self.chats, "w") as f:
            for n in range(12):
                turns = [("user", "q" * (n + 1)), ("assistant", "a" * (n + 2))]
                f.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")

    def command(self, out, layout, *extra):
        rows = self.rows
        if layout == "chat":
            rows, layout, extra = self.chats, "files", ("--tokenizer", TINY, *extra)
        return [os.path.join(self.a.bin, "tools/sluice"), "extract", "-m", self.a.model, "-i", rows, "-o", out,
                "--threads", "1", "-l", "n", "--layout", layout, "--codec", "none", "--batch-tokens", "64", "--json",
                "--set", "store.commit_time=5ms", "--set", "supervise.backoff_max=20ms", "--set", "feed.credit_rows=10",
                "--set", "store.reserve=0", *extra]

    def extract(self, out, layout, fail=None):
        env = dict(os.environ)
        if fail:
            env.update(LD_PRELOAD=os.path.join(self.a.bin, "tests/libfail_calls.so"), SLUICE_FAIL=fail)
        try:
            p = subprocess.run(self.command(out, layout), env=env, capture_output=True, text=True, timeout=WAIT)
            return p.returncode, p.stderr
        except subprocess.TimeoutExpired:
            return "no end", ""

    def files(self, out):
        """What the run wrote, by name: files, and of each row in commit.log who it is, its verdict and its states_sum. (Where in a
        shard a row lies follows from the commit groups, and these from the time.)"""
        got = {}
        for root, _, names in os.walk(os.path.join(out, "hidden_states")):
            got.update({n: open(os.path.join(root, n), "rb").read() for n in names})
        log = open(os.path.join(out, "commit.log"), "rb").read()
        rows = [log[at:at + 48] + log[at + 52:at + 56] + log[at + 96:at + 104] for at in range(128, len(log), 128)]
        got["commit.log"] = sorted(rows)
        return got

    def case(self, case, want):
        layout, program, call, path, err, first, count, says = case
        name = f"{layout}: {program} {call} {path} {errno.errorcode.get(err, 'half')} x{count}"
        if self.a.only not in name:
            return True
        out, wrong = os.path.join(self.work, re.sub(r"[^\w]+", "_", name)), []
        state = out + ".calls"
        rc, err_text = self.extract(out, layout, f"{program} {call} {path} {err} {first} {count} {state}")
        log = open(os.path.join(out, "sluice.log")).read() if os.path.exists(os.path.join(out, "sluice.log")) else ""
        met = os.path.getsize(state) if os.path.exists(state) else 0
        if rc != 0:
            wrong.append(f"ended with {rc}: {err_text[-400:]}")
        elif self.files(out) != want[layout]:
            wrong.append("the store differs from that of the undisturbed run")
        if met < first:
            wrong.append(f"the call came {met} times, number {first} was to fail: the case proves nothing")
        if says and says not in log:
            wrong.append(f"the log does not say '{says}'")
        print(f"{'FAIL ' if wrong else 'ok   '} {name}{': ' + '; '.join(wrong) if wrong else ''}", flush=True)
        if wrong and not os.path.exists(self.rows):
            print(f"      somebody has removed what was in {self.work} while the test ran")
        if wrong:
            print(f"      kept: {out}; the end of its log:\n" + "".join("      " + x[:300] + "\n" for x in log.splitlines()[-20:]))
        else:
            shutil.rmtree(out)
        return not wrong

    def gone(self, out):
        """The daemon dies with its parent, a moment later; its lock goes with it."""
        end = time.monotonic() + WAIT
        with open(os.path.join(out, "sluiced.lock"), "r+") as f:
            while time.monotonic() < end:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except OSError:
                    time.sleep(0.02)
        return False

    def damaged(self):
        """Accepted, then damaged on disk, then to be computed."""
        out = os.path.join(self.work, "damaged")
        p = subprocess.Popen(self.command(out, "files", "--set", "test.crash_points=rank.after_load:1", "--set",
                                          "supervise.backoff_min=1h", "--set", "supervise.backoff_max=1h"),
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        log, end = os.path.join(out, "intake.log"), time.monotonic() + WAIT
        while time.monotonic() < end and p.poll() is None and not (os.path.exists(log) and os.path.getsize(log) >= 128 * 42):
            time.sleep(0.02)  # the header, the data set, 40 rows; no rank is there to compute them
        p.kill()
        p.wait()
        if not self.gone(out):
            print("FAIL  damaged intake.dat: sluiced survived its parent")
            return False
        with open(os.path.join(out, "intake.dat"), "r+b") as f:
            f.seek(os.path.getsize(f.name) - 3)
            f.write(b"\7")
        rc, said = self.extract(out, "files")  # at once: nothing of it is waited for or tried again
        log = open(os.path.join(out, "sluice.log")).read()
        ok = rc == 78 and "row 39 (seq 39): intake.dat" in said and "restart in" not in log.split("row 39 (seq 39)")[1]
        print(f"{'ok   ' if ok else 'FAIL '} damaged intake.dat{'' if ok else f': ended with {rc}: {said[-600:]}'}")
        return ok


    def tokenize(self):
        """The command that shows rows waits as the feeder does."""
        name, state = "sluice tokenize: fork EAGAIN x2", os.path.join(self.work, "tokenize.calls")
        if self.a.only not in name:
            return True
        cmd = [os.path.join(self.a.bin, "tools/sluice"), "tokenize", "-m", TINY, "--json", self.chats]
        env = dict(os.environ, LD_PRELOAD=os.path.join(self.a.bin, "tests/libfail_calls.so"), SLUICE_FAIL=f"sluice fork - {AGAIN} 1 2 {state}")
        a, b = (subprocess.run(cmd, env=e, capture_output=True, text=True, timeout=WAIT) for e in (None, env))
        ok = a.returncode == b.returncode == 0 and a.stdout == b.stdout and "WARNING: waiting" in b.stderr
        print(f"{'ok   ' if ok else 'FAIL '} {name}{'' if ok else f': {a.returncode}, {b.returncode}: {a.stderr[-300:]} {b.stderr[-300:]}'}")
        return ok


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--only", default="")
    a = ap.parse_args()
    a.bin, a.model = os.path.abspath(a.bin), os.path.abspath(a.model)
    need = [os.path.join(a.bin, "tools/sluice"), os.path.join(a.bin, "tests/libfail_calls.so"), os.path.join(a.model, "config.json")]
    if not all(map(os.path.exists, need)):
        print(f"SKIP: not there: {[p for p in need if not os.path.exists(p)]}")
        return 77
    r, want = Runs(a), {}
    for layout in ("files", "shards", "chat"):
        out = os.path.join(r.work, "reference-" + layout)
        rc, said = r.extract(out, layout)
        if rc:
            print(f"FAIL  the undisturbed run ended with {rc}: {said[-600:]}")
            return 1
        want[layout] = r.files(out)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # they wait more than they work
        good = list(pool.map(lambda c: r.case(c, want), CASES)) + [r.tokenize()] + ([] if a.only else [r.damaged()])
    print(f"{len(good)} cases, {good.count(False)} failed")
    if all(good):
        shutil.rmtree(r.work)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
