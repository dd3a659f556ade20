"""Stores of both layouts. See ipc/store.h and ipc/journal.h for every field used here."""
import json
import os
import struct

import numpy as np

try:
    import xxhash
except ImportError:  # checksums are then checked by `sluice verify` only
    xxhash = None

JREC = 128
BLOCK_BYTES = 4 << 20
INTAKE = np.dtype([("magic", "<u4"), ("kind", "<u2"), ("length", "<u2"), ("seq", "<u8"), ("key", "<u8", 2), ("content", "<u8", 2),
                   ("row", "<u8"), ("dataset", "<u4"), ("part", "<u4"), ("T", "<u4"), ("mask_sum", "<u4"), ("data_off", "<u8"), ("data_len", "<u8"),
                   ("id_len", "<u4"), ("reason", "<u2"), ("flags", "<u2"), ("limits", "<u4", 4), ("data_sum", "<u8"), ("pad", "V4"), ("crc", "<u4")])
COMMIT = np.dtype([("magic", "<u4"), ("kind", "<u2"), ("length", "<u2"), ("seq", "<u8"), ("key", "<u8", 2), ("row", "<u8"), ("dataset", "<u4"),
                   ("T", "<u4"), ("epoch", "<u4"), ("verdict", "<u2"), ("k", "<u2"), ("token", "<u4"), ("shard", "<u4"), ("off", "<u8"), ("len", "<u8"),
                   ("raw_bytes", "<u8"), ("nll", "<f4"), ("mask_sum", "<u4"), ("states_sum", "<u8"), ("time_ns", "<u8"), ("file_sum", "<u8"), ("spare", "<u4"),
                   ("crc", "<u4")])
FRAME = np.dtype([("magic", "<u4"), ("version", "u1"), ("kind", "u1"), ("codec", "u1"), ("elem", "u1"), ("off", "<u8"), ("seq", "<u8"), ("row", "<u8"),
                  ("dataset", "<u4"), ("part", "<u4"), ("k", "<u2"), ("n_states", "<u2"), ("hidx", "<u4"), ("t0", "<u4"), ("rows", "<u4"), ("T", "<u4"),
                  ("width", "<u4"), ("raw_len", "<u8"), ("enc_len", "<u8"), ("raw_sum", "<u8"), ("enc_sum", "<u8"), ("key", "<u8", 2), ("spare", "V12"),
                  ("crc", "<u4")])
assert INTAKE.itemsize == COMMIT.itemsize == FRAME.itemsize == 128
META, STATE, END = 1, 2, 3
FRAME_MAGIC = 0x52464C53


class StoreError(Exception):
    """The store is damaged or not one; the message says where."""


def bf16_to_f32(bits):
    """bf16 bits (uint16) as float32 values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _log(path, magic, dtype):
    """Records of a log up to the first that is not good (a torn tail)."""
    if not os.path.exists(path):
        return np.zeros(0, dtype)
    raw = np.fromfile(path, np.uint8)
    rec = raw[:len(raw) // JREC * JREC].view(dtype)
    bad = np.flatnonzero((rec["magic"] != magic) | (rec["length"] != JREC))
    return rec[:bad[0]] if len(bad) else rec


def manifest_sum(text):
    """The checksum that belongs into the text of a manifest: XXH3-64 with zeros in place of the digits."""
    at = text.rindex(b'"checksum": "xxh3:') + 18
    return f"xxh3:{xxhash.xxh3_64_intdigest(text[:at] + b'0' * 16 + text[at + 16:]):016x}"


def _dataset_dir(index, name):
    """sl_store_dataset_dir: the folder of a data set."""
    if index == 0:
        return ""
    raw = name.encode()
    out, changed = "", not raw or len(raw) > 100 or (raw[:3] == b"hs_" and raw[3:4].isdigit())
    for i, b in enumerate(raw[:100]):
        ok = b < 128 and (chr(b).isalnum() or chr(b) in "_-" or (b == 46 and i))
        out += chr(b) if ok else "_"
        changed |= not ok
    return out + (f"~{index}" if changed else "")


def _zstd(data, size):
    try:
        import zstandard
    except ImportError as e:
        raise StoreError("this store is compressed: install the Python package zstandard") from e
    out = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    if len(out) != size:
        raise StoreError(f"a compressed plane has {len(out)} bytes, expected {size}")
    return np.frombuffer(out, np.uint8)


def decode(codec, data, rows, width, elem):
    """Payload of a STATE frame as [rows, width] of uint16 (bf16 bits) or float32."""
    kind, n = (np.uint16 if elem == 2 else np.float32), rows * width
    if codec == 0:
        flat = np.frombuffer(data, kind)
    elif codec == 1:
        flat = _zstd(data, n * elem).view(kind)
    elif codec == 2:
        version, flags, _, bias_len, exp_len, ref_len = struct.unpack_from("<BBHIII", data)
        if version != 1 or flags > 1 or (ref_len and not flags) or elem != 2:
            raise StoreError("a bf16 block of another version")
        at, m = 16 + ref_len, rows
        if flags:  # tokens that repeat an earlier one: 0 stored, v + 1 the same as stored token v
            ref = _zstd(data[16:at], 4 * rows).view("<u4").astype(np.int64)
            new = ref == 0
            m = int(new.sum())
            if np.any(ref > np.cumsum(new)):
                raise StoreError("a bf16 block that repeats a token it does not have")
            pick = np.where(new, np.cumsum(new) - 1, ref - 1)
        if at + bias_len + m * width + exp_len != len(data):
            raise StoreError("a bf16 block whose parts do not fit")
        bias = _zstd(data[at:at + bias_len], width) if bias_len else np.zeros(width, np.uint8)
        mant = np.frombuffer(data, np.uint8, m * width, at + bias_len).reshape(m, width)
        expo = _zstd(data[at + bias_len + m * width:], m * width).reshape(m, width)
        w = (expo + bias).astype(np.uint16) << 8 | mant
        flat = (w >> 1 | w << 15)
        flat = (flat[pick] if flags else flat).ravel()
    else:
        raise StoreError(f"codec {codec} is unknown to this version")
    if flat.size != n:
        raise StoreError(f"a block of {flat.size} elements, expected {n}")
    return flat.reshape(rows, width)


class Row:
    """One committed row. Nothing is read before it is asked for."""

    def __init__(self, store, rec):
        self._s, self._c = store, rec
        self.seq, self.row, self.tokens = int(rec["seq"]), int(rec["row"]), int(rec["T"])
        self.dataset_index, self.mask_sum = int(rec["dataset"]), int(rec["mask_sum"])
        self.nll = None if np.isnan(rec["nll"]) else float(rec["nll"])
        a = store._accepted.get(self.seq)
        self.part = int(a["part"]) if a is not None else 0
        self.dataset = store.datasets.get(self.dataset_index, "")
        self._meta = None

    def __repr__(self):
        return f"<row {self.row}{f'.{self.part}' if self.part else ''} of {self.dataset!r}: {self.tokens} tokens>"

    def _load_meta(self):
        if self._meta is None:
            self._meta = self._s._file_meta(self) if self._s.layout == "files" else self._s._shard_meta(self)
        return self._meta

    @property
    def ids(self):
        return self._load_meta()[0]

    @property
    def mask(self):
        return self._load_meta()[1]

    @property
    def id(self):
        return self._load_meta()[2]

    def state(self, which, start=0, stop=None, raw=False):
        """[stop-start, width] of one state: an index, or a label ("18", "final"). float32 unless raw."""
        k = self._s.state_index(which)
        stop = self.tokens if stop is None else min(stop, self.tokens)
        x = (self._s._file_state if self._s.layout == "files" else self._s._shard_state)(self, k, start, max(stop - start, 0))
        return x if raw or x.dtype != np.uint16 else bf16_to_f32(x)

    def states(self, raw=False):
        """[T, K, width], states in the order of store.labels."""
        return np.stack([self.state(k, raw=raw) for k in range(len(self._s.labels))], 1)


class Store:
    """A store folder, as it is now. Index it by position, or find(row, dataset, part)."""

    def __init__(self, path):
        self.path = os.fspath(path)
        try:
            with open(os.path.join(self.path, "manifest.json"), "rb") as f:
                text = f.read()
            m = json.loads(text)
            if m["format"] != "sluice-store" or m["version"] != 2:
                raise StoreError(f"{path}: format {m['format']} version {m['version']} is not readable here")
            if xxhash and manifest_sum(text) != m["checksum"]:
                raise StoreError(f"{path}: manifest.json does not match its checksum")
            self.manifest, self.layout, self.width = m, m["layout"], m["model"]["width"]
            self.n_layers, self.elem = m["model"]["n_layers"], {"bf16": 2, "f32": 4}[m["states"]["dtype"]]
            self.captures = [(c["h"], bool(c["final_norm"])) for c in m["states"]["captures"]]
        except (OSError, KeyError, ValueError) as e:
            raise StoreError(f"{path} is not a store: {e!r}") from e
        self.labels = ["final" if f else str(h) for h, f in self.captures]
        self.block_rows = max(1, BLOCK_BYTES // (self.width * self.elem))
        intake = _log(os.path.join(self.path, "intake.log"), 0x4E494C53, INTAKE)
        self._accepted = {int(r["seq"]): r for r in intake[intake["kind"] == 3]}
        self.datasets = {}
        for r in intake[intake["kind"] == 2]:
            self.datasets[int(r["dataset"])] = self._dat(int(r["data_off"]), int(r["data_len"])).decode("utf-8", "replace")
        log = _log(os.path.join(self.path, "commit.log"), 0x4D434C53, COMMIT)
        rows = log[log["kind"] == 2]
        self._rows = rows[np.argsort(rows["seq"], kind="stable")]
        self.rejected = int((log["kind"] == 3).sum())
        self._fds, self._heads = {}, {}

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return Row(self, self._rows[i])

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def find(self, row, dataset=None, part=0):
        """The row with this number; KeyError when there is none."""
        for r in self._rows[self._rows["row"] == row]:
            x = Row(self, r)
            if x.part == part and (x.dataset_index == 0 if dataset is None else x.dataset == dataset):
                return x
        raise KeyError(f"no row {row} part {part} of data set {dataset!r} in {self.path}")

    def state_index(self, which):
        if isinstance(which, int):
            return range(len(self.labels))[which]
        if which in self.labels:
            return self.labels.index(which)
        raise KeyError(f"state {which!r} is not in the store, which has {', '.join(self.labels)}")

    def close(self):
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds = {}

    def __getstate__(self):  # worker processes open their own files
        return {**self.__dict__, "_fds": {}}

    # -- reading --

    def _dat(self, off, n):
        with open(os.path.join(self.path, "intake.dat"), "rb") as f:
            return os.pread(f.fileno(), n, off)

    def _open(self, path):
        if path not in self._fds:
            if len(self._fds) >= 32:
                os.close(self._fds.pop(next(iter(self._fds)))[0])
            fd = os.open(path, os.O_RDONLY)
            self._fds[path] = (fd, os.fstat(fd).st_size)
        return self._fds[path]

    def _pread(self, path, off, n):
        fd, _ = self._open(path)
        out = os.pread(fd, n, off)
        if len(out) != n:
            raise StoreError(f"{path}: {n} bytes at {off} are not there")
        return out

    def shard_path(self, rec):
        p = os.path.join(self.path, "shards", f"shard-{int(rec['shard']):06}.sls")
        return p if os.path.exists(p) else p + ".open"

    def _frame(self, path, off, kind, row):
        f = np.frombuffer(self._pread(path, off, 128), FRAME)[0]
        if f["magic"] != FRAME_MAGIC or f["version"] != 2 or f["kind"] != kind or f["off"] != off or f["seq"] != row.seq:
            raise StoreError(f"{path}: no frame of kind {kind} of {row} at {off}")
        return f

    def _payload(self, path, f):
        data = self._pread(path, int(f["off"]) + 128, int(f["enc_len"]))
        if xxhash and xxhash.xxh3_64_intdigest(data) != int(f["enc_sum"]):
            raise StoreError(f"{path}: the bytes at {int(f['off'])} do not match their checksum")
        return data

    def _shard_meta(self, row):
        path, off = self.shard_path(row._c), int(row._c["off"])
        data = self._payload(path, self._frame(path, off, META, row))
        id_len, T = struct.unpack_from("<I", data)[0], row.tokens
        return (np.frombuffer(data, np.int32, T, 32), np.frombuffer(data, np.uint8, T, 32 + 4 * T),
                data[32 + 5 * T:32 + 5 * T + id_len].decode("utf-8", "replace"))

    def _shard_state(self, row, k, start, n):
        path, off, K = self.shard_path(row._c), int(row._c["off"]), len(self.captures)
        blocks = -(-row.tokens // self.block_rows)
        span = -(-(128 + 16 + 8 * K * blocks) // 64) * 64
        end = self._payload(path, self._frame(path, off + int(row._c["len"]) - span, END, row))
        rel = np.frombuffer(end, np.uint64, K * blocks, 16)
        out = np.empty((n, self.width), np.uint16 if self.elem == 2 else np.float32)
        for b in range(start // self.block_rows, min(blocks, -(-(start + n) // self.block_rows))):
            f = self._frame(path, off + int(rel[k * blocks + b]), STATE, row)
            t0, rows = int(f["t0"]), int(f["rows"])
            if f["k"] != k or t0 != b * self.block_rows or f["width"] != self.width or f["elem"] != self.elem:
                raise StoreError(f"{path}: the frame at {int(f['off'])} is not state {k} of {row}")
            x = decode(int(f["codec"]), self._payload(path, f), rows, self.width, self.elem)
            a, e = max(t0, start), min(t0 + rows, start + n)
            out[a - start:e - start] = x[a - t0:e - t0]
        return out

    def file_path(self, row):
        sub = _dataset_dir(row.dataset_index, row.dataset)
        return os.path.join(self.path, "hidden_states", sub, f"hs_{row.row}{f'.{row.part}' if row.part else ''}.safetensors")

    def _head(self, path):
        if path not in self._heads:
            n = struct.unpack("<Q", self._pread(path, 0, 8))[0]
            if n > 1 << 20:
                raise StoreError(f"{path}: a header of {n} bytes")
            self._heads = {path: (8 + n, json.loads(self._pread(path, 8, n)))}
        return self._heads[path]

    def _file_meta(self, row):
        path = self.file_path(row)
        base, h = self._head(path)
        a, m = h["token_ids"]["data_offsets"][0], h["loss_mask"]["data_offsets"][0]
        return (np.frombuffer(self._pread(path, base + a, 8 * row.tokens), np.int64).astype(np.int32),
                np.frombuffer(self._pread(path, base + m, row.tokens), np.uint8), h["__metadata__"].get("id", ""))

    def _file_state(self, row, k, start, n):
        path = self.file_path(row)
        base, h = self._head(path)
        T, K, H = h["hidden_states"]["shape"]
        kind, rb = (np.uint16 if self.elem == 2 else np.float32), H * self.elem
        if T != row.tokens or H != self.width:
            raise StoreError(f"{path}: shape {T, K, H}")
        if k == K:
            at = base + h["final_norm"]["data_offsets"][0] + start * rb
            return np.frombuffer(self._pread(path, at, n * rb), kind).reshape(n, H)
        x = np.frombuffer(self._pread(path, base + start * K * rb, n * K * rb), kind)
        return x.reshape(n, K, H)[:, k]
