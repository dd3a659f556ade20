#!/usr/bin/env python3
"""Kill matrix: whatever is killed whenever, the store ends up the same.

One uninterrupted run of 300 rows over a small model with two ranks is the reference. Then the same run again and again,
each time disturbed: a stage kills itself at a named crash point, random stages are killed at random moments, everything
is killed at once (extract included) and the command is run again, the disk fills up and gets room again. Each time the
files in hidden_states/ must be byte for byte those of the reference, and commit.log must hold every row exactly once with
the same sums.

usage: kill_matrix.py --bin BUILD_DIR --model tests/golden/smollm [--only WORD] [--seed N] [--rows N]
Exit 0: all equal; 1: a difference (the store is kept and named); 77: the programs or the model are not there."""

import argparse
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from common import private_sockets

REC = 128
WAIT = 900  # seconds; only to end a run that hangs
COMMIT_MAGIC, COMMIT, REJECT = 0x4D434C53, 2, 3


def make_rows(path, n, vocab, seed=1):
    rng = random.Random(seed)
    with open(path, "w") as f:
        for i in range(n):
            length = rng.choice([1, 2, 3, 7, 16, 33, 60, 61, 90])
            ids = [rng.randrange(vocab) for _ in range(length)]
            f.write(json.dumps({"id": f"r{i}", "input_ids": ids, "loss_mask": [j % 2 for j in range(length)]}) + "\n")


def commit_rows(store):
    """commit.log as {seq: (kind, key, row, dataset, T, verdict, states_sum)}; a row twice is an error."""
    out = {}
    data = open(os.path.join(store, "commit.log"), "rb").read()
    for off in range(0, len(data) - REC + 1, REC):
        rec = data[off : off + REC]
        magic, kind, _ = struct.unpack_from("<IHH", rec, 0)
        if magic != COMMIT_MAGIC or kind not in (COMMIT, REJECT):
            continue
        seq, key0, key1, row, dataset, tokens = struct.unpack_from("<QQQQII", rec, 8)
        (verdict,) = struct.unpack_from("<H", rec, 52)
        (states_sum,) = struct.unpack_from("<Q", rec, 96)
        if seq in out:
            raise AssertionError(f"row seq {seq} is in commit.log twice")
        out[seq] = (kind, key0, key1, row, dataset, tokens, verdict, states_sum)
    return out


def files_of(store):
    d = os.path.join(store, "hidden_states")
    return {n: open(os.path.join(d, n), "rb").read() for n in sorted(os.listdir(d))}


class Matrix:
    def __init__(self, a):
        self.a = a
        self.sluice = os.path.join(a.bin, "tools", "sluice")
        self.work = tempfile.mkdtemp(prefix="sltest-kill-")
        private_sockets(self.work)
        self.rows = os.path.join(self.work, "rows.jsonl")
        vocab = json.load(open(os.path.join(a.model, "config.json")))["vocab_size"]
        make_rows(self.rows, a.rows, vocab)
        self.failed = []
        self.ran = 0

    def command(self, out, extra=()):
        return [self.sluice, "extract", "--model", self.a.model, "--input", self.rows, "--output", out, "--tp", "2",
                "--threads", "1", "--layers", "0,n/2,n", "--layout", "files", "--codec", "none", "--batch-tokens", "256",
                "--set", "memory.batch_depth=4", "--set", "supervise.restarts=200", "--nll-every", "16",
                "--set", "supervise.backoff_max=200ms", "--json", *extra]

    def start(self, out, extra=()):
        log = open(out + ".out", "ab")
        return subprocess.Popen(self.command(out, extra), stdout=log, stderr=log)

    def finish(self, p):
        try:
            return p.wait(WAIT)
        except subprocess.TimeoutExpired:
            kill_all(tree(p.pid) + [p.pid])
            raise AssertionError(f"not done after {WAIT} s")

    def until(self, p, met):
        """Wait until something is so; False when the process ended before."""
        end = time.monotonic() + WAIT
        while not met():
            if p.poll() is not None:
                return met()
            if time.monotonic() > end:
                kill_all(tree(p.pid) + [p.pid])
                raise AssertionError(f"did not come about in {WAIT} s")
            time.sleep(0.02)
        return True

    def reference(self):
        out = os.path.join(self.work, "reference")
        self.current = out
        t = time.monotonic()
        rc = self.finish(self.start(out))
        if rc != 0:
            raise AssertionError(f"the undisturbed run ended with {rc}: see {out}.out")
        self.ref_files, self.ref_rows = files_of(out), commit_rows(out)
        self.ref_seconds = time.monotonic() - t
        n = len(self.ref_rows)
        if n != self.a.rows or len(self.ref_files) != n or any(r[0] != COMMIT for r in self.ref_rows.values()):
            raise AssertionError(f"the undisturbed run wrote {len(self.ref_files)} files and {n} rows of {self.a.rows}")
        print(f"ok    reference: {n} rows, {sum(map(len, self.ref_files.values()))} bytes in {self.ref_seconds:.1f} s")

    def compare(self, out):
        files, rows = files_of(out), commit_rows(out)
        if rows != self.ref_rows:
            bad = [s for s in set(rows) | set(self.ref_rows) if rows.get(s) != self.ref_rows.get(s)]
            raise AssertionError(f"{len(bad)} rows of commit.log differ, for example seq {min(bad)}: "
                                 f"{rows.get(min(bad))} instead of {self.ref_rows.get(min(bad))}")
        if files.keys() != self.ref_files.keys():
            raise AssertionError(f"other files: {sorted(files.keys() ^ self.ref_files.keys())[:5]}")
        bad = [n for n in files if files[n] != self.ref_files[n]]
        if bad:
            raise AssertionError(f"{len(bad)} files differ, for example {bad[0]}")

    def case(self, name, fn):
        if self.a.only and self.a.only not in name:
            return
        out = os.path.join(self.work, re.sub(r"[^\w.-]", "_", name))
        self.current = out
        t = time.monotonic()
        self.ran += 1
        try:
            said = fn(out)
            if said == "skip":
                return
            self.compare(out)
            print(f"ok    {name}{': ' + said if said else ''} ({time.monotonic() - t:.1f} s)", flush=True)
            shutil.rmtree(out, ignore_errors=True)
        except AssertionError as e:
            self.failed.append(name)
            if not os.path.exists(self.rows):
                e = f"somebody has removed what was in {self.work} while the test ran; {e}"
            print(f"FAIL  {name}: {e}\n      kept: {out}; the end of what was said and of the log:", flush=True)
            for path in (out + ".out", os.path.join(out, "sluice.log")):
                if os.path.exists(path):
                    print("".join("      " + x[:300] for x in open(path, errors="replace").readlines()[-20:]), flush=True)

    # ---- the ways to be disturbed ----

    def crash_point(self, point, count):
        def run(out):
            rc = self.finish(self.start(out, ["--set", f"test.crash_points={point}:{count}"]))
            if not os.path.exists(os.path.join(out, ".crash", point)):
                raise AssertionError("the point was never reached: the case proves nothing")
            if rc != 0:
                raise AssertionError(f"extract ended with {rc}")
        return run

    def random_stages(self, seed):
        def run(out):
            rng, kills, latest = random.Random(seed), 0, self.ref_seconds / 4
            while not kills:  # the reference was slow, this run was not: again from the start, and earlier
                shutil.rmtree(out, ignore_errors=True)
                p = self.start(out, ["--set", "supervise.backoff_max=20ms"])
                while p.poll() is None and kills < 6:
                    time.sleep(rng.uniform(0.01, 0.01 + latest))
                    stages = [q for q in tree(p.pid) if name_of(q).startswith("sluice-")]
                    if stages:
                        kill_all([rng.choice(stages)])
                        kills += 1
                rc = self.finish(p)
                if rc != 0:
                    raise AssertionError(f"extract ended with {rc}")
                latest /= 2
            return f"{kills} kills"
        return run

    def everything(self, seed):
        def run(out):
            rng, kills, latest = random.Random(seed), 0, self.ref_seconds / 2
            for _ in range(20):
                p = self.start(out)
                try:
                    rc = p.wait(rng.uniform(0.05, latest))
                    if rc == 0 and not kills:  # the reference was slow, this run was not: again from the start, and earlier
                        shutil.rmtree(out)
                        latest = max(latest / 2, 0.1)
                        continue
                except subprocess.TimeoutExpired:
                    kill_all(tree(p.pid) + [p.pid] if seed % 2 else [p.pid])  # odd: all by name; even: by parent's death
                    p.wait()
                    wait_gone(self.a.bin, out)
                    kills += 1
                    if kills >= 4:
                        rc = self.finish(self.start(out))
                        break
                    continue
                break
            if rc != 0:
                raise AssertionError(f"the last run ended with {rc}")
            if kills == 0:
                raise AssertionError("nothing was killed")
            return f"{kills} times"
        return run

    def interrupt(self, twice):
        """Ctrl-C: accepted rows are finished (75, or 0 when that was all); a second one kills. Then the command again."""
        def run(out):
            p = self.start(out)  # before it has opened its log it does not listen to signals yet
            if self.until(p, lambda: os.path.exists(os.path.join(out, "sluice.log"))):
                time.sleep(self.ref_seconds * 0.4)
            p.send_signal(signal.SIGINT)
            if twice:
                time.sleep(0.03)
                p.send_signal(signal.SIGINT)
            rc = self.finish(p)
            if rc not in (0, 75):
                raise AssertionError(f"the interrupted run ended with {rc}")
            wait_gone(self.a.bin, out)
            rc2 = self.finish(self.start(out))
            if rc2 != 0:
                raise AssertionError(f"the run after it ended with {rc2}")
            return f"status {rc}, then {rc2}"
        return run

    def disk_full(self, out):
        os.mkdir(out)
        small, large = "size=1500k", "size=64m"
        r = subprocess.run(["mount", "-t", "tmpfs", "-o", small, "tmpfs", out], capture_output=True, text=True)
        if r.returncode:
            print(f"SKIP  disk full: a tmpfs cannot be mounted here ({r.stderr.strip()}); needs root", flush=True)
            os.rmdir(out)
            return "skip"
        try:
            p = self.start(out, ["--set", "store.reserve=128KiB"])
            def paused():
                s = subprocess.run([self.sluice, "status", "--json", "--at", out], capture_output=True, text=True)
                return s.returncode in (0, 1) and s.stdout.startswith("{") and json.loads(s.stdout)["disk"]["paused"]
            if not self.until(p, paused):
                raise AssertionError(f"the flow never said that the disk is full; extract ended with {p.poll()}")
            time.sleep(0.5)
            before = len(commit_rows(out))
            subprocess.run(["mount", "-o", "remount," + large, out], check=True)
            rc = self.finish(p)
            if rc != 0:
                raise AssertionError(f"extract ended with {rc}")
            self.compare(out)
            return f"paused at {before} rows"
        finally:
            copy = out + ".copy"
            shutil.copytree(out, copy, dirs_exist_ok=True)
            subprocess.run(["umount", "-l", out], check=False)
            os.rmdir(out)
            os.rename(copy, out)


def name_of(pid):
    try:
        return open(f"/proc/{pid}/comm").read().strip()
    except OSError:
        return ""


def tree(root):
    """All descendants of a process, the deepest last."""
    kids = {}
    for d in os.listdir("/proc"):
        if d.isdigit():
            try:
                stat = open(f"/proc/{d}/stat").read()
            except OSError:
                continue
            kids.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(d))
    out, todo = [], [root]
    while todo:
        for k in kids.get(todo.pop(), []):
            out.append(k)
            todo.append(k)
    return out


def kill_all(pids):
    for p in pids:
        try:
            os.kill(p, signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_gone(_bin, out):
    """The next run must not meet the lock of the one that is dying."""
    import fcntl
    end = time.monotonic() + WAIT
    try:
        f = open(os.path.join(out, "sluiced.lock"), "r+")
    except OSError:
        return
    while time.monotonic() < end:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            time.sleep(0.02)
    raise AssertionError("sluiced survived its parent")


def crash_points(source):
    """Every name in the sources, so that a new point is covered without being listed here."""
    found = set()
    for base in ("stages", "ipc", "daemon"):
        for root, _, names in os.walk(os.path.join(source, base)):
            for n in names:
                if n.endswith(".c"):
                    found |= set(re.findall(r'sl_crash_point\("([^"]+)"\)', open(os.path.join(root, n)).read()))
    return sorted(found)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--source", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    ap.add_argument("--rows", type=int, default=300)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--only", default="")
    a = ap.parse_args()
    a.bin, a.model = os.path.abspath(a.bin), os.path.abspath(a.model)
    need = [os.path.join(a.bin, p) for p in ("tools/sluice", "daemon/sluiced", "stages/feeder/sluice-feeder",
            "stages/compute/sluice-compute", "stages/gather/sluice-gather", "stages/writer/sluice-writer")]
    missing = [p for p in need + [os.path.join(a.model, "config.json")] if not os.path.exists(p)]
    if missing:
        print(f"SKIP: not there: {missing}")
        return 77
    start = time.monotonic()
    m = Matrix(a)
    try:
        m.reference()
    except AssertionError as e:
        print(f"FAIL  reference: {e}")
        return 1
    for point in crash_points(a.source):
        m.case(point, m.crash_point(point, 1 if point in ("rank.after_load",) else 2))
    for i in range(3):
        m.case(f"random stages {i}", m.random_stages(a.seed * 1000 + i))
    for i in range(3):
        m.case(f"everything at once {i}", m.everything(a.seed * 1000 + i))
    m.case("Ctrl-C", m.interrupt(False))
    m.case("Ctrl-C twice", m.interrupt(True))
    m.case("disk full", m.disk_full)
    print(f"{m.ran} cases, {len(m.failed)} failed, {time.monotonic() - start:.0f} s, seed {a.seed}")
    if m.failed:
        return 1
    shutil.rmtree(m.work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
