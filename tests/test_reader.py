#!/usr/bin/env python3
"""The Python package against stores of known content (made by test_verify --make) and its exports key by key.
   test_reader.py TEST_VERIFY"""
import json, os, pickle, shutil, subprocess, sys, tempfile, zipfile

try:
    import numpy as np
    import zstandard  # noqa: F401
except ImportError as e:
    print(f"SKIPPED: {e}", file=sys.stderr)
    sys.exit(77)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
from sluice_reader import Store, StoreError, bf16_to_f32, store  # noqa: E402
from sluice_reader.export import export  # noqa: E402

M = (1 << 64) - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & M
    return x ^ x >> 31


def value(seq, k, t, h):
    """store_rig.c: rig_fill, one element as bf16 bits."""
    x = mix(mix(seq << 20 ^ k << 16 ^ (t if k else t % 5)) ^ h)
    f = np.float32((np.float32(x & 0xFFFF) + np.float32(x >> 16 & 0xFFFF) - np.float32(65536)) / np.float32(32768) * np.float32(2.0 ** (mix(h) % 5 - 2)))
    return int(f.view(np.uint32)) >> 16


class Fake:  # stands for what torch would make of a file of torch_zip: a restricted unpickler
    @staticmethod
    def load(path):
        z = zipfile.ZipFile(path)
        assert all(i.compress_type == 0 for i in z.infolist()) and z.read("archive/version") == b"3\n"

        class U(pickle.Unpickler):
            def find_class(self, module, name):
                if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
                    return lambda st, off, size, stride, grad, hooks: np.lib.stride_tricks.as_strided(
                        st[off:], size, [s * st.itemsize for s in stride]).copy()
                if module == "torch" and name.endswith("Storage"):
                    return {"BFloat16Storage": np.uint16, "FloatStorage": np.float32, "LongStorage": np.int64, "ByteStorage": np.uint8}[name]
                if (module, name) == ("collections", "OrderedDict"):
                    return dict
                raise pickle.UnpicklingError(f"{module}.{name}")

            def persistent_load(self, pid):
                _, kind, key, dev, n = pid
                raw = z.read(f"archive/data/{key}")
                a = np.frombuffer(raw, kind)
                assert dev == "cpu" and len(a) == n
                return a
        return U(z.open("archive/data.pkl")).load()


def torch_load(path):
    try:
        import torch
    except ImportError:
        return Fake.load(path)
    out = torch.load(path, weights_only=True, mmap=True)
    conv = lambda v: [conv(x) for x in v] if isinstance(v, list) else (v.view(torch.uint16) if v.dtype == torch.bfloat16 else v).numpy() if hasattr(v, "numpy") else v
    return {k: conv(v) for k, v in out.items()}


def check_store(s, n):
    assert len(s) == n and s.labels == ["0", "2", "5", "final"], (len(s), s.labels)
    for row in s:
        ids = [mix(row.seq * 7919 + t) % 1000 for t in range(row.tokens)]
        assert row.ids.tolist() == ids and row.mask.tolist() == [t >= row.tokens // 2 for t in range(row.tokens)] and row.id == f'id "{row.seq}"'
        for k in range(4):
            x = row.state(k, raw=True)
            assert x.shape == (row.tokens, 64)
            for t in {0, row.tokens // 2, row.tokens - 1}:
                for h in (0, 5, 63):
                    assert x[t, h] == value(row.seq, k, t, h), (row, k, t, h)
            a = row.tokens // 3
            assert (row.state(k, a, a + 2, raw=True) == x[a:a + 2]).all()
        assert (row.state("final") == bf16_to_f32(x)).all()
    r = s.find(1, s.datasets[1])
    assert r.row == 1 and r.dataset_index == 1


def rchar():
    return int(open("/proc/self/io").readline().split()[1])


def check_little_is_read(maker, base):
    """One state of one row takes less than twice its bytes of reading, as the kernel counts them."""
    for codec in ("none", "zstd", "bf16"):
        path = os.path.join(base, "large" + codec)
        subprocess.run([maker, "--make", path, "shards", codec, "6", "1024", "400"], check=True)
        s, most = Store(path), 0
        for row in (r for r in s if r.tokens > 20):
            for k in range(4):
                a = rchar()
                idle = rchar() - a
                a = rchar()
                x = row.state(k, raw=True)
                most = max(most, (rchar() - a - idle) / x.nbytes)
        assert 0 < most < 2, (codec, most)
        print(f"{codec}: at most {most:.3f} times a state's bytes read")


def check_exports(s, base):
    out = os.path.join(base, "e")
    for fmt, ext, key in (("speculators-0.3", "data_{}.pt", "hidden_states"), ("modelopt", "row_{:08}.pt", "hidden_states")):
        info = export(s, fmt, out)
        for i, w in enumerate(info["rows"]):
            row, d = s.find(w["row"], w["dataset"], w["part"]), torch_load(os.path.join(out, ext.format(i)))
            assert (d["input_ids"] == row.ids).all() and (d["loss_mask"] == row.mask).all() and d["input_ids"].dtype == np.int64
            if fmt == "modelopt":
                assert d["hidden_states_prenorm"] is True and (d[key] == row.state("5", raw=True)).all()
                assert (d["aux_hidden_states"] == np.concatenate([row.state("0", raw=True), row.state("2", raw=True)], 1)).all()
            else:
                assert isinstance(d[key], list) and len(d[key]) == 3
                assert all((x == row.state(h, raw=True)).all() for x, h in zip(d[key], ("0", "2", "5")))
        if fmt == "speculators-0.3":
            assert json.load(open(os.path.join(out, "sample_lengths.json"))) == {str(i): w["tokens"] for i, w in enumerate(info["rows"])}
        shutil.rmtree(out)
    try:  # two states below the last: specforge wants exactly three
        export(s, "specforge", out)
        raise AssertionError("specforge took two aux layers")
    except StoreError as e:
        assert "3 states" in str(e), e
    shutil.rmtree(out, ignore_errors=True)


def check_specforge(maker, base):
    """A store whose manifest names three states below the last: change the labels of one (the last is then the normed one)."""
    path, out = os.path.join(base, "sf"), os.path.join(base, "e3")
    subprocess.run([maker, "--make", path, "shards", "bf16", "20"], check=True)
    m = json.load(open(os.path.join(path, "manifest.json")))
    m["model"]["n_layers"], m["states"]["captures"][3]["h"] = 9, 9
    text = json.dumps(m).encode()
    if store.xxhash:
        with open(os.path.join(path, "manifest.json"), "wb") as f:
            f.write(text)
        try:
            Store(path)
            raise AssertionError("an edited manifest was taken")
        except StoreError as e:
            assert "checksum" in str(e), e
        m["checksum"] = store.manifest_sum(text)
    with open(os.path.join(path, "manifest.json"), "w") as f:
        json.dump(m, f)
    s = Store(path)
    rows = [r for r in s if r.tokens > 1]
    s._rows = s._rows[[int(r.tokens) > 1 for r in s]]
    export(s, "specforge", out)
    order = sorted(rows, key=lambda r: (r.dataset_index, r.row, r.part))
    for i, row in enumerate(order):
        d = torch_load(os.path.join(out, f"row_{i:08}.ckpt"))
        assert set(d) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert d["hidden_state"].shape == (1, row.tokens, 64) and (d["hidden_state"][0] == row.state("final", raw=True)).all()
        assert d["aux_hidden_state"].shape == (1, row.tokens, 192) and (d["aux_hidden_state"][0, :, 64:128] == row.state("2", raw=True)).all()


def main():
    base = tempfile.mkdtemp(prefix="sltest-reader-")
    try:
        for layout, codec in (("files", "none"), ("shards", "none"), ("shards", "zstd"), ("shards", "bf16")):
            path = os.path.join(base, layout + codec)
            subprocess.run([sys.argv[1], "--make", path, layout, codec, "24"], check=True)
            s = Store(path)
            check_store(s, 24)
            check_exports(s, base)
            print(f"{layout} {codec}: {len(s)} rows read and exported")
        check_specforge(sys.argv[1], base)
        check_little_is_read(sys.argv[1], base)
    finally:
        shutil.rmtree(base)


main()
