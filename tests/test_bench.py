#!/usr/bin/env python3
"""sluice bench on the CPU, tiny: what every compute bench prints, that the figures fit each other, and how a group fails.

    test_bench.py SLUICE GOLDEN
"""
import json, re, subprocess, sys

sluice, golden = sys.argv[1:3]
SMALL = {
    "gemm": ["--tokens", "64", "--width", "64", "--out", "64"],
    "attention": ["--rows", "2", "--length", "64", "--heads", "4", "--kv-heads", "2", "--dqk", "32", "--dv", "32"],
    "moe": ["--tokens", "64", "--width", "64", "--inter", "32", "--experts", "8", "--top-k", "2"],
}


def bench(what, *args):
    p = subprocess.run([sluice, "bench", what, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=900)
    return p.returncode, p.stdout, p.stderr


def printed(what, *args):
    rc, out, err = bench(what, *args)
    assert rc == 0, (what, args, rc, err)
    return json.loads(out)


def near(a, b, what):
    assert abs(a - b) <= 1e-4 * abs(b), (what, a, b)


for what, args in SMALL.items():
    j = printed(what, *args, "--inner", "2", "--repeat", "3")
    assert j["tflop_s"] > 0 and j["gb_s"] > 0 and j["ceiling_tflop_s"] > 0, j
    near(j["fraction"], j["floor_ms"] / j["ms"], f"{what}: fraction")

for what in ("forward", "capture"):
    j = printed(what, "--config", f"{golden}/llama", "--rows", "3", "--length", "40", "--repeat", "3")
    near(j["tok_s"], j["tokens"] / sorted(j["seconds"])[len(j["seconds"]) // 2], f"{what}: tok/s")
    near(j["gflop_s"], j["tok_s"] * j["gflop_per_token"], f"{what}: flop/s")
    near(j["fraction"], j["gflop_s"] / j["ceiling_gflop_s"], f"{what}: fraction")
    near(j["floor_s"], j["tokens"] * j["gflop_per_token"] / j["ceiling_gflop_s"], f"{what}: floor")
    assert (what == "capture") == ("capture_tok_s" in j), j

for family, ranks in (("llama", 2), ("kimi_k2", 4)):  # a sum behind attention and one behind the MLP of every layer
    j = printed("forward", "--config", f"{golden}/{family}", "--rows", "3", "--length", "40", "--repeat", "3", "--ranks", str(ranks))
    assert j["ranks"] == ranks and j["how"] == "host memory", j
    assert j["sums"] == 2 * j["layers_run"], j
    assert j["unsummed_tok_s"] > 0 and j["sums_alone_s"] > 0 and "sums_exposed" in j and j["slowest_rank_over_fastest"] >= 1, j

j = printed("allreduce", "--ranks", "3", "--tokens", "50", "--width", "33", "--inner", "2", "--repeat", "3")
assert j["bytes"] == 50 * 33 * 2 and j["bus_gb_s"] > 0 and j["how"] == "host memory", j

# A rank that cannot go on takes the group with it, in time, and says why.
rc, out, err = bench("forward", "--config", f"{golden}/llama", "--ranks", "7")
assert rc == 78 and not out and re.search(r"rank \d", err) and "widths that work" in err, (rc, out, err)
rc, out, err = bench("forward", "--config", f"{golden}/no-such-model", "--ranks", "2")
assert rc == 78 and not out and "no-such-model" in err, (rc, out, err)
print("ok")
