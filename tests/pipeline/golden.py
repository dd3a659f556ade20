#!/usr/bin/env python3
"""The whole pipeline against the reference: real processes, one golden family.

    golden.py --bin BUILD --golden tests/golden/FAMILY [--widths 1,2,3,4] [--groups]

Runs `sluice extract` with f32 at each tensor-parallel width that divides the model (compare.py --tol 2e-5), in bf16 at the
first and last of them (--band), and with --groups also as two groups of two, in both. A width that does not divide must be
refused with status 78 and the widths that work. In f32 the rows are run once more in reverse order and once more each in a
batch of its own: a row's states must not depend on its company by more than 1e-5. Each store is read back by verify --deep.
Nothing but Python is needed. Exit 0, 1, or 77 when the programs or the reference are not there."""

import argparse
import array
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile

WAIT = 900  # seconds; only to end a run that hangs


def divides(config, tp):
    """The rule for dense families; None where experts or latent attention make it another one."""
    if "num_local_experts" in config or "num_experts" in config or "n_routed_experts" in config or "text_config" in config:
        return None
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    return heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) and config["intermediate_size"] % tp == 0


def states(path):
    """{name: floats of an f32 tensor} of one file."""
    raw = open(path, "rb").read()
    (n,) = struct.unpack_from("<Q", raw)
    out = {}
    for name, t in json.loads(raw[8 : 8 + n]).items():
        if name != "__metadata__" and t["dtype"] == "F32":
            out[name] = array.array("f", raw[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]])
    return out


class Family:
    def __init__(self, a, work):
        self.sluice, self.golden, self.work = os.path.join(a.bin, "tools", "sluice"), a.golden, work
        self.compare = os.path.join(os.path.dirname(a.golden), "compare.py")
        self.name, self.rows, self.failed = os.path.basename(a.golden), os.path.join(a.golden, "rows.jsonl"), []

    def extract(self, what, out, precision, tp, dp=1, rows=None, more=()):
        cmd = [self.sluice, "extract", "--model", self.golden, "--input", rows or self.rows, "--output", out, "--layers", "all",
               "--final", "both", "--layout", "files", "--codec", "none", "--precision", precision, "--backend", "cpu",
               "--tp", str(tp), "--dp", str(dp), "--threads", "1", "--json", *more]
        r = subprocess.run(cmd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT)
        if r.returncode not in (0, 78):
            self.fail(what, f"extract ended with {r.returncode}: {r.stderr[-2000:]}")
        return r

    def fail(self, what, why):
        self.failed.append(what)
        print(f"FAIL  {self.name} {what}: {why}", flush=True)

    def judge(self, what, out, how):
        for cmd in ([sys.executable, self.compare, self.golden, out, *how], [self.sluice, "verify", "--deep", out]):
            r = subprocess.run(cmd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT)
            if r.returncode != 0:
                self.fail(what, f"{os.path.basename(cmd[0])} {cmd[1]}: {r.stdout[-1500:]}{r.stderr[-500:]}")
                return
            if "compare.py" in cmd[1]:
                print(f"ok    {what}: {r.stdout.strip().splitlines()[-1]}", flush=True)

    def run(self, precision, tp, dp=1):
        """One width; False when the model does not divide so."""
        what = f"{precision} tp {tp} dp {dp}"
        out = os.path.join(self.work, what.replace(" ", "-"))
        r = self.extract(what, out, precision, tp, dp)
        want = divides(json.load(open(os.path.join(self.golden, "config.json"))), tp)
        if r.returncode == 78:
            if want or "widths that work: 1" not in r.stderr:
                self.fail(what, f"refused: {r.stderr[-500:]}")
            else:
                print(f"ok    {what}: refused, it does not divide")
            return False
        if want is False:
            self.fail(what, "this width does not divide and was not refused")
        if r.returncode == 0:
            self.judge(what, out, ["--tol", "2e-5"] if precision == "f32" else ["--band"])
        return r.returncode == 0

    def company(self):
        """Reversed order in one batch, and each row alone in a batch, against f32 tp 1."""
        lines = open(self.rows).read().splitlines()
        back = os.path.join(self.work, "reversed.jsonl")
        with open(back, "w") as f:
            f.write("\n".join(reversed(lines)) + "\n")
        longest = max(len(json.loads(x)["input_ids"]) for x in lines)
        base = os.path.join(self.work, "f32-tp-1-dp-1", "hidden_states")
        cases = [("in reverse order", back, (), lambda i: len(lines) - 1 - i),
                 ("each alone", self.rows, ("--batch-tokens", str(longest), "--max-length", str(longest)), lambda i: i)]
        for what, rows, more, place in cases:
            out = os.path.join(self.work, what.replace(" ", "-"))
            if self.extract(what, out, "f32", 1, rows=rows, more=more).returncode != 0:
                continue
            worst = 0.0
            for i in range(len(lines)):
                a = states(os.path.join(base, f"hs_{i}.safetensors"))
                b = states(os.path.join(out, "hidden_states", f"hs_{place(i)}.safetensors"))
                if not a or a.keys() != b.keys() or any(len(a[k]) != len(b[k]) for k in a):
                    self.fail(what, f"row {i} has other tensors")
                    continue
                for k in a:
                    num = math.sqrt(sum((x - y) ** 2 for x, y in zip(a[k], b[k])))
                    worst = max(worst, num / max(math.sqrt(sum(x * x for x in a[k])), 1e-30))
            if not worst <= 1e-5:
                self.fail(what, f"relative difference {worst:.3g} > 1e-5")
            else:
                print(f"ok    {what}: worst {worst:.3g}", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True)
    ap.add_argument("--golden", required=True)
    ap.add_argument("--widths", default="1,2,3,4")
    ap.add_argument("--groups", action="store_true")
    a = ap.parse_args()
    a.bin, a.golden = os.path.abspath(a.bin), os.path.abspath(a.golden)
    for need in (os.path.join(a.bin, "tools", "sluice"), os.path.join(a.golden, "golden.safetensors")):
        if not os.path.exists(need):
            print(f"SKIPPED: {need} is not there")
            return 77
    work = tempfile.mkdtemp(prefix="sltest-golden-")
    f = Family(a, work)
    try:
        did = [tp for tp in map(int, a.widths.split(",")) if f.run("f32", tp)]
        for tp in sorted({did[0], did[-1]}) if did else []:
            f.run("bf16", tp)
        if a.groups and 2 in did:
            f.run("f32", 2, 2)
            f.run("bf16", 2, 2)
        if 1 in did:
            f.company()
        else:
            f.fail("tp 1", "never ran")
    finally:
        if f.failed:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{f.name}: {len(f.failed)} failed")
    return 1 if f.failed else 0


if __name__ == "__main__":
    sys.exit(main())
