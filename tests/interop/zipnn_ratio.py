#!/usr/bin/env python3
"""Codec bf16 beside ZipNN and zstd on the same real states, each on one thread, by processor time.
   zipnn_ratio.py SLUICE STORE [REPEATS]
STORE: a store of bf16 states, as of `sluice extract --layers all`. Every codec gets the same bytes cut in the same way: one state of
one row at a time, as a store that reads any layer of any row alone must. ZipNN is also given everything at once ("whole"), which spares
it the ends of rows. Its best time counts, and ours; the two take turns. Needs `pip install zipnn` (0.5 wants torch); exits 77 without."""
import json, os, statistics, subprocess, sys, tempfile, time

try:
    import warnings
    warnings.filterwarnings("ignore")
    import zipnn
    from importlib.metadata import version
except ImportError as e:
    print(f"SKIPPED: {e}", file=sys.stderr)
    sys.exit(77)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
from sluice_reader import Store  # noqa: E402

sluice, s, repeats = sys.argv[1], Store(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 3


def run_zipnn(blocks):
    z = zipnn.ZipNN(method="AUTO", input_format="byte", bytearray_dtype="bfloat16", threads=1)
    enc = dec = raw = out = 0
    for b in blocks:
        a = bytearray(b)  # compress() changes its input
        t = time.process_time()
        c = z.compress(a)
        enc += time.process_time() - t
        t = time.process_time()
        d = z.decompress(c)
        dec += time.process_time() - t
        if bytes(d) != b:
            sys.exit("ZipNN did not give back what went in")
        raw, out = raw + len(b), out + len(c)
    return raw / out, raw / enc / 1e9, raw / dec / 1e9


with tempfile.TemporaryDirectory() as tmp:
    raw, lens = os.path.join(tmp, "states"), os.path.join(tmp, "lengths")
    blocks = [row.state(k, raw=True).tobytes() for k in range(len(s.captures)) for row in s]
    with open(raw, "wb") as f, open(lens, "w") as g:
        for b in blocks:
            f.write(b)
            g.write(f"{len(b) // (2 * s.width)}\n")
    size = os.path.getsize(raw)
    whole = [b"".join(blocks)]
    res = {}
    for _ in range(repeats):
        out = subprocess.run([sluice, "bench", "codec", "--input", raw, "--lengths", lens, "--bytes", str(size), "--width", str(s.width),
                              "--repeat", "1"], check=True, stdout=subprocess.PIPE).stdout
        for c in json.loads(out)["codecs"]:
            res.setdefault("sluice " + c["codec"], []).append((c["ratio"], c["encode_gb_s"], c["decode_gb_s"]))
        res.setdefault("zipnn a row and state", []).append(run_zipnn(blocks))
        res.setdefault("zipnn whole", []).append(run_zipnn(whole))
    print(f"{s.manifest['model']['path'].rsplit('/', 1)[-1]}: {size / 1e6:.0f} MB of states, {len(s.captures)} states of {len(s)} rows, "
          f"width {s.width}; zipnn {version('zipnn')}, one thread, {repeats} turns")
    print(f"| {'codec':22} | ratio | compress GB/s | decompress GB/s |\n|---|---|---|---|")
    best = {k: (v[0][0], max(x[1] for x in v), max(x[2] for x in v)) for k, v in res.items()}
    for k, v in best.items():
        print(f"| {k:22} | {v[0]:.4f} | {v[1]:.3f} | {v[2]:.3f} |")
    print("our bf16 ÷ zipnn's better figure: ratio %.4f, compress %.2f, decompress %.2f (median of turns %.2f, %.2f)" % (
        tuple(best["sluice bf16"][i] / max(best["zipnn a row and state"][i], best["zipnn whole"][i]) for i in range(3)) +
        tuple(statistics.median(a[i] / max(b[i], c[i]) for a, b, c in zip(res["sluice bf16"], res["zipnn a row and state"], res["zipnn whole"]))
              for i in (1, 2))))
