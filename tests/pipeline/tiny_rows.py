#!/usr/bin/env python3
"""Many tiny rows: 20,000 of 1 to 8 tokens through the whole pipeline; nothing may grow with the number of rows.

    tiny_rows.py --bin BUILD --model tests/golden/smollm [--rows N]

While `sluice extract` runs, the anonymous and the resident memory of each of its processes is sampled, and how many rows are
committed by then. After warm-up (a fifth of the rows) the floor of a process may not rise by more than SLACK, 64 bytes for
each of the remaining rows. Two things may hold something for each row, and both are bounded: the index of the open shard (so
shards are small here) and the feeder's table of the rows it has, at most 128 bytes each. Then every row has to be in the
store once, with its own length, and verify --deep has to agree. Everything is watched from outside and by rows, not by
seconds, so nothing depends on how fast the machine is. Exit 0, 1, or 77 when the programs or the model are not there."""

import argparse
import collections
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time

SLACK_KIB, FEEDER_ROW = 1024, 128
RECORD, MAGIC, COMMIT = 128, 0x4D434C53, 2


def memory(pid):
    """(name, resident KiB, anonymous KiB) or None when it is gone."""
    try:
        fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
        return fields["Name"].strip(), int(fields["VmRSS"].split()[0]), int(fields["RssAnon"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def tree(root):
    kids = collections.defaultdict(list)
    for d in filter(str.isdigit, os.listdir("/proc")):
        try:
            kids[int(open(f"/proc/{d}/stat").read().rsplit(")", 1)[1].split()[1])].append(int(d))
        except OSError:
            pass
    out = [root]
    for p in out:
        out += kids[p]
    return out


def commits(store):
    try:
        return os.path.getsize(os.path.join(store, "commit.log")) // RECORD
    except OSError:
        return 0


def check_memory(samples, rows):
    """samples: {(name, pid): [(rows committed, resident, anonymous)]}. Sentences about what grew; were there enough."""
    bad, seen = [], set()
    for (name, pid), points in sorted(samples.items()):
        warm = [p for p in points if rows * 0.2 <= p[0] < rows]
        if len(warm) < 8 or not name.startswith("sluice"):
            continue
        seen.add(name)
        third = len(warm) // 3
        # The least of a stretch: a peak in between is no growth, a floor that rises is.
        for what, col in (("resident", 1), ("anonymous", 2)):
            grown = min(p[col] for p in warm[-third:]) - min(p[col] for p in warm[:third])
            if grown > SLACK_KIB:
                bad.append(f"{name} [{pid}]: {what} memory rose by {grown} KiB between row {warm[0][0]} and row {warm[-1][0]}")
        print(f"      {name:16} {len(warm):4} samples, anonymous {warm[0][2]} to {warm[-1][2]} KiB, "
              f"resident {warm[0][1]} to {warm[-1][1]} KiB")
        if name == "sluice-feeder":
            grown = max(p[2] for p in points) - min(p[2] for p in points)
            if grown * 1024 > FEEDER_ROW * rows + SLACK_KIB * 1024:
                bad.append(f"{name}: {grown} KiB for {rows} rows: more than {FEEDER_ROW} bytes each")
    need = {"sluice", "sluiced", "sluice-feeder", "sluice-compute", "sluice-gather", "sluice-writer"}
    return bad, not need - seen


def check_rows(store, lengths):
    data = open(os.path.join(store, "commit.log"), "rb").read()
    found = collections.Counter()
    for off in range(0, len(data) - RECORD + 1, RECORD):
        magic, kind = struct.unpack_from("<IH", data, off)
        if magic == MAGIC and kind == COMMIT:
            row, _, tokens = struct.unpack_from("<QII", data, off + 32)
            found[row, tokens] += 1
    want = collections.Counter(enumerate(lengths))
    if found == want:
        return []
    return [f"{len(want - found)} rows are missing, {len(found - want)} are too many or of another length"]


def run(a, sluice, vocab, n, work):
    """One run of n rows: faults found, and whether there were enough samples to tell."""
    rows, store, log = (os.path.join(work, f"{n}-{x}") for x in ("rows.jsonl", "out", "log"))
    rng = random.Random(11)
    lengths = [rng.randint(1, 8) for _ in range(n)]
    with open(rows, "w") as f:
        for i, length in enumerate(lengths):
            f.write(json.dumps({"id": f"t{i}", "input_ids": [rng.randrange(vocab) for _ in range(length)]}) + "\n")
    start = time.monotonic()
    samples = collections.defaultdict(list)
    with open(log, "wb") as f:
        p = subprocess.Popen([sluice, "extract", "--model", a.model, "--input", rows, "--output", store, "--layers", "0,n",
                              "--backend", "cpu", "--tp", "2", "--threads", "1", "--batch-tokens", "512", "--nll-every", "0",
                              "--shard-size", "4MiB", "--json"], stdin=subprocess.DEVNULL, stdout=f, stderr=f)
        while p.poll() is None:
            done = commits(store)
            for pid in tree(p.pid):
                m = memory(pid)
                if m:
                    samples[m[0], pid].append((done, m[1], m[2]))
            time.sleep(0.03)
    if p.returncode != 0:
        return [f"extract ended with {p.returncode}: {open(log, errors='replace').read()[-2000:]}"], True
    bad, enough = check_memory(samples, n)
    bad += check_rows(store, lengths)
    v = subprocess.run([sluice, "verify", "--deep", "--quiet", store], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if v.returncode != 0:
        bad.append(f"verify --deep ended with {v.returncode}: {v.stdout[-1500:]}")
    print(f"{n} rows of 1 to 8 tokens in {time.monotonic() - start:.1f} s, {len(bad)} faults", flush=True)
    return bad, enough


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--rows", type=int, default=20000)
    a = ap.parse_args()
    sluice = os.path.join(os.path.abspath(a.bin), "tools", "sluice")
    config = os.path.join(a.model, "config.json")
    if not os.path.exists(sluice) or not os.path.exists(config):
        print(f"SKIPPED: {sluice} or {config} is not there")
        return 77
    work = tempfile.mkdtemp(prefix="sltest-tiny-")
    for n in (a.rows, 4 * a.rows):  # a busy machine may look too seldom: then longer
        bad, enough = run(a, sluice, json.load(open(config))["vocab_size"], n, work)
        if bad or enough:
            break
        bad = ["too few samples of some process: nothing is proven"]
    for b in bad:
        print("FAIL ", b)
    if bad:
        print(f"kept: {work}")
        return 1
    shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
