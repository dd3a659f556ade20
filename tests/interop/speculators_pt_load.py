#!/usr/bin/env python3
"""Do speculators 0.3 and 0.4 themselves load our export of .pt files? Every row's ids, mask and states must be equal.
   speculators_pt_load.py TEST_VERIFY     TEST_VERIFY: path of test_verify, which makes a store of known content
Needs `pip install 'speculators==0.3.*'` or 0.4; says so and exits 77 without it."""
import os, shutil, subprocess, sys, tempfile

try:
    import torch
    from speculators.train.data import Eagle3SampleFileDataset
    from importlib.metadata import version
except ImportError as e:
    print(f"SKIPPED: {e}", file=sys.stderr)
    sys.exit(77)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
from sluice_reader import Store  # noqa: E402
from sluice_reader.dataset import as_tensor  # noqa: E402
from sluice_reader.export import export  # noqa: E402

base = tempfile.mkdtemp(prefix="sltest-interop-")
try:
    store, out = os.path.join(base, "store"), os.path.join(base, "out")
    subprocess.run([sys.argv[1], "--make", store, "shards", "bf16", "24"], check=True)
    s = Store(store)
    rows = export(s, "speculators-0.3", out)["rows"]
    ds = Eagle3SampleFileDataset(max_len=4096, datapath=out, hidden_states_dtype=torch.bfloat16)
    assert len(ds) == len(rows) == 24, (len(ds), len(rows))
    bits = lambda x: x.contiguous().view(torch.int16)
    for at, path in enumerate(ds.data):
        w = rows[int(os.path.basename(path)[len("data_"):-len(".pt")])]
        row, d = s.find(w["row"], w["dataset"], w["part"]), ds[at]
        ids, mask = torch.from_numpy(row.ids.copy()), torch.from_numpy(row.mask.copy())
        aux = torch.cat([as_tensor(row.state(h, raw=True)) for h in ("0", "2")], 1)
        last = as_tensor(row.state("5", raw=True))
        # the class pairs token t + 1 with the states of token t: its rows are one shorter
        assert d["input_ids"].tolist() == ids[1:].tolist() and d["loss_mask"].tolist() == mask[1:].tolist(), path
        assert torch.equal(bits(d["hidden_states"]), bits(aux[:-1])), path
        assert torch.equal(bits(d["verifier_last_hidden_states"]), bits(last[1:])), path
        whole = torch.load(path, mmap=True, weights_only=True)  # what the shift cuts off: first id, first last state, last aux state
        assert whole["input_ids"].tolist() == ids.tolist() and whole["loss_mask"].tolist() == mask.tolist(), path
        assert torch.equal(bits(torch.cat(whole["hidden_states"], 1)), bits(torch.cat([aux, last], 1))), path
    exact = ds.approx_lengths == [s.find(w["row"], w["dataset"], w["part"]).tokens for w in
                                  (rows[int(os.path.basename(p)[5:-3])] for p in ds.data)]
    print(f"speculators {os.environ.get('SPECULATORS_VERSION') or version('speculators')}: Eagle3SampleFileDataset loaded {len(ds)} rows, ids, masks and states "
          f"equal; row lengths {'exact (sample_lengths.json)' if exact else 'estimated from file sizes, as this version does'}")
finally:
    shutil.rmtree(base)
