#!/usr/bin/env python3
"""Does the speculators package itself load what we export? Every row's ids, mask and states must be equal.
   speculators_load.py TEST_VERIFY     TEST_VERIFY: path of test_verify, which makes a store of known content
Needs `pip install speculators` (0.5 or later); says so and exits 77 without it."""
import os, shutil, subprocess, sys, tempfile

try:
    import torch
    from importlib.metadata import version
    from speculators.train.data import ArrowDataset
except ImportError as e:
    print(f"SKIPPED: {e}", file=sys.stderr)
    sys.exit(77)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
from sluice_reader import Store  # noqa: E402
from sluice_reader.dataset import StateDataset, as_tensor  # noqa: E402
from sluice_reader.export import export  # noqa: E402

base = tempfile.mkdtemp(prefix="sltest-interop-")
try:
    store, out = os.path.join(base, "store"), os.path.join(base, "out")
    subprocess.run([sys.argv[1], "--make", store, "shards", "bf16", "24"], check=True)
    s = Store(store)
    info = export(s, "speculators", out)
    ds = ArrowDataset(max_len=4096, datapath=out, on_missing="raise")
    assert len(ds) == len(info["rows"]) == 24
    for i, w in enumerate(info["rows"]):
        row, d = s.find(w["row"], w["dataset"], w["part"]), ds._get_raw_data(i)
        want = torch.stack([as_tensor(row.state(h, raw=True)) for h in ("0", "2", "5")], 1)
        assert d["input_ids"].tolist() == row.ids.tolist() and d["loss_mask"].tolist() == row.mask.tolist(), i
        got = torch.cat([d["hidden_states"].reshape(row.tokens, -1), d["verifier_last_hidden_states"].reshape(row.tokens, -1)], 1)
        assert torch.equal(got.view(torch.int16), want.reshape(row.tokens, -1).view(torch.int16)), i
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
    freq = torch.load(os.path.join(out, "token_freq.pt"), weights_only=True)
    seen = [t for i in range(len(ds)) for t, m in zip(ds._get_raw_data(i)["input_ids"].tolist(), ds._get_raw_data(i)["loss_mask"].tolist()) if m]
    assert sum(freq.values()) == len(seen) and all(freq[t] == seen.count(t) for t in set(seen))
    d2t, t2d = build_vocab_mappings_from_distribution(freq, draft_vocab_size=64, target_vocab_size=s.manifest["model"]["vocab"])
    common = sorted(freq, key=lambda t: -freq[t])[:8]
    assert len(d2t) == 64 and int(t2d.sum()) == 64 and all(bool(t2d[t]) for t in common if freq[t] > freq[sorted(freq, key=lambda u: -freq[u])[63]])
    item = StateDataset(s)[3]
    assert item["hidden_states"].shape == (s[3].tokens, 3, 64) and item["final_norm"].dtype == torch.bfloat16
    print(f"speculators {version('speculators')}: ArrowDataset loaded {len(ds)} rows, ids, masks and states equal; "
          f"its vocabulary mapping takes token_freq.pt")
finally:
    shutil.rmtree(base)
