"""Exports to the formats that trainers load. Layers keep their meaning: what a format cannot hold, or would misread, is refused.

    speculators       DIR is a Hugging Face data set (input_ids, loss_mask, seq_len) with hidden_states/hs_<i>.safetensors beside it
                      (speculators >= 0.5); last state H[n] before the final norm. Needs `datasets`.
    speculators-0.3   data_<i>.pt: input_ids, loss_mask, hidden_states = list of [T, width], last one H[n] before the final norm
    specforge         row_<i>.ckpt: input_ids, loss_mask, hidden_state [1, T, width] AFTER the final norm, aux_hidden_state [1, T, 3*width]
    modelopt          row_<i>.pt: input_ids, loss_mask, hidden_states [T, width], aux_hidden_states [T, K*width], hidden_states_prenorm

i counts the exported rows from 0; export.json says which row of which data set each one is."""
import json
import os
import struct

import numpy as np

from .norm import FinalNorm
from .store import Store, StoreError
from .torch_zip import Bf16, save


class Source:
    """Which stored state is which part of an export."""

    def __init__(self, store, model=None):
        self.store, self.final_kind = store, store.manifest["states"]["final"]
        n = store.n_layers
        self.pre = next((k for k, (h, f) in enumerate(store.captures) if h == n and not f), None)
        self.post = next((k for k, (h, f) in enumerate(store.captures) if f), None)
        self.aux = [k for k in range(len(store.captures)) if k not in (self.pre, self.post)]
        self.aux_h = [store.captures[k][0] for k in self.aux]
        self.model, self._norm = model or store.manifest["model"]["path"], None

    def need_pre(self, fmt):
        if self.pre is None:
            raise StoreError(f"{fmt} wants H[{self.store.n_layers}] before the final norm; the store has states {', '.join(self.store.labels)}. "
                             "The norm cannot be undone: extract with --final pre or both")

    def need_aux(self, fmt, count=None):
        if not self.aux or (count and len(self.aux) != count):
            raise StoreError(f"{fmt} wants {count or 'some'} states below the last one; the store has H {', '.join(map(str, self.aux_h)) or 'none'}")

    def need_last(self, fmt):
        if self.pre is None and self.post is None:
            raise StoreError(f"{fmt} wants the last state; the store has H {', '.join(map(str, self.aux_h))} only")
        if self.post is None:
            self._norm = FinalNorm(self.model)

    def get(self, row, k):
        return row.state(k, raw=True)

    def normed(self, row):
        return self.get(row, self.post) if self.post is not None else self._norm(self.get(row, self.pre))


def _t(x):
    return Bf16(x) if x.dtype == np.uint16 else np.ascontiguousarray(x)


def _ids(row):
    return row.ids.astype(np.int64), row.mask.astype(np.int64)


def _rows(store, dataset):
    rows = [r for r in store if dataset is None or r.dataset == dataset]
    if not rows:
        raise StoreError(f"{store.path} has no committed rows" + (f" of data set {dataset!r}" if dataset else ""))
    return sorted(rows, key=lambda r: (r.dataset_index, r.row, r.part))


def _safetensors(path, tensors, meta):
    head, off, parts = {"__metadata__": meta}, 0, []
    for name, x in tensors.items():
        raw = np.ascontiguousarray(x).tobytes()
        head[name] = {"dtype": {"uint16": "BF16", "float32": "F32", "int64": "I64"}[x.dtype.name], "shape": list(x.shape), "data_offsets": [off, off + len(raw)]}
        off += len(raw)
        parts.append(raw)
    h = json.dumps(head).encode()
    h += b" " * (-(8 + len(h)) % 64)
    with open(path + ".tmp", "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h + b"".join(parts))
    os.replace(path + ".tmp", path)


def speculators(src, rows, out):
    src.need_pre("speculators")
    src.need_aux("speculators")
    try:
        from datasets import Dataset
    except ImportError as e:
        raise StoreError("the export to speculators makes a Hugging Face data set: install the Python package datasets") from e
    ids = [r.ids.astype(np.int64).tolist() for r in rows]
    ds = Dataset.from_dict({"input_ids": ids, "loss_mask": [r.mask.astype(np.int64).tolist() for r in rows], "seq_len": [len(x) for x in ids]})
    ds.save_to_disk(out)
    state = os.path.join(out, "state.json")  # the loader wants torch tensors from the data set; this needs no torch here
    with open(state, encoding="utf-8") as f:
        s = json.load(f)
    s["_format_type"], s["_format_kwargs"], s["_format_columns"] = "torch", {}, None
    with open(state, "w", encoding="utf-8") as f:
        json.dump(s, f)
    os.makedirs(os.path.join(out, "hidden_states"), exist_ok=True)
    for i, r in enumerate(rows):
        x = np.stack([src.get(r, k) for k in src.aux + [src.pre]], 1)
        _safetensors(os.path.join(out, "hidden_states", f"hs_{i}.safetensors"), {"hidden_states": x, "token_ids": r.ids.astype(np.int64)},
                     {"h_indices": ",".join(map(str, src.aux_h + [src.store.n_layers])), "final": "pre"})
    freq = np.zeros(src.store.manifest["model"]["vocab"], np.int64)
    for r in rows:
        np.add.at(freq, r.ids[r.mask != 0], 1)
    save(os.path.join(out, "token_freq.pt"), {int(t): int(freq[t]) for t in np.flatnonzero(freq)})
    return {"target_layer_ids": src.aux_h, "hint": f"--target-layer-ids {' '.join(map(str, src.aux_h))}"}


def speculators_03(src, rows, out):
    src.need_pre("speculators-0.3")
    src.need_aux("speculators-0.3")
    lengths = {}
    for i, r in enumerate(rows):
        ids, mask = _ids(r)
        save(os.path.join(out, f"data_{i}.pt"), {"input_ids": ids, "loss_mask": mask, "hidden_states": [_t(src.get(r, k)) for k in src.aux + [src.pre]]})
        lengths[str(i)] = r.tokens
    with open(os.path.join(out, "sample_lengths.json"), "w", encoding="utf-8") as f:
        json.dump(lengths, f)
    layers = [h - 1 for h in src.aux_h] + [src.store.n_layers - 1]  # this version counts the output of layer L, which is H[L+1]
    with open(os.path.join(out, "data_config.json"), "w", encoding="utf-8") as f:
        json.dump({"layer_ids": layers, "h_indices": src.aux_h + [src.store.n_layers], "num_samples": len(rows), "hidden_size": src.store.width}, f, indent=1)
    n, note = src.store.n_layers, None
    if src.aux_h != [3, n // 2 + 1, n - 2]:
        note = f"layers H {src.aux_h} are not that version's own defaults H {[3, n // 2 + 1, n - 2]}: train with the same ids everywhere"
    return {"layer_ids": layers, "hint": note}


def specforge(src, rows, out):
    src.need_aux("specforge", 3)
    src.need_last("specforge")
    short = [r for r in rows if r.tokens < 2]  # the loader squeezes dimensions of one
    rows[:] = [r for r in rows if r.tokens >= 2]
    for i, r in enumerate(rows):
        ids, mask = _ids(r)
        aux = np.concatenate([src.get(r, k) for k in src.aux], 1)[None]
        save(os.path.join(out, f"row_{i:08}.ckpt"), {"input_ids": ids, "loss_mask": mask, "hidden_state": _t(src.normed(r)[None]), "aux_hidden_state": _t(aux)})
    hint = f"{len(short)} rows of one token are left out: specforge's loader cannot hold them" if short else None
    return {"aux_layer_ids": [h - 1 for h in src.aux_h], "left_out": len(short), "hint": hint}


def modelopt(src, rows, out):
    src.need_aux("modelopt")
    pre = src.pre is not None
    if not pre and src.post is None:
        src.need_last("modelopt")
    for i, r in enumerate(rows):
        ids, mask = _ids(r)
        aux = np.concatenate([src.get(r, k) for k in src.aux], 1)
        save(os.path.join(out, f"row_{i:08}.pt"), {"input_ids": ids, "loss_mask": mask, "hidden_states": _t(src.get(r, src.pre if pre else src.post)),
                                                   "aux_hidden_states": _t(aux), "hidden_states_prenorm": pre})
    return {"aux_layer_ids": [h - 1 for h in src.aux_h], "hint": None}


FORMATS = {"speculators": speculators, "speculators-0.3": speculators_03, "specforge": specforge, "modelopt": modelopt}


def export(store, fmt, out, dataset=None, model=None):
    """Export to a new or empty folder; returns what export.json holds."""
    store = store if isinstance(store, Store) else Store(store)
    if os.path.isdir(out) and os.listdir(out):
        raise StoreError(f"{out} is not empty")
    rows, src = _rows(store, dataset), Source(store, model)
    os.makedirs(out, exist_ok=True)
    info = FORMATS[fmt](src, rows, out)
    info.update(format=fmt, h_indices=src.aux_h, n_layers=store.n_layers, model=store.manifest["model"]["fingerprint"],
                rows=[{"dataset": r.dataset, "row": r.row, "part": r.part, "tokens": r.tokens} for r in rows])
    # Loaders walk the folder: what describes the export stands beside it, not in it.
    with open(os.path.normpath(out) + ".export.json", "w", encoding="utf-8") as f:
        json.dump(info, f)
    return info
