#!/usr/bin/env python3
"""Damaged checkpoints, one kind after the other, from the command line: each is refused with status 78 and a sentence that names
what is wrong; nothing crashes, and no process takes more than 1 GiB. Then the sound one works in the same store.

    damaged_models.py SLUICE GOLDEN/kimi_k25_int4
"""
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile

LAYER = "language_model.model.layers.2."
EXPERT = LAYER + "mlp.experts.7.up_proj.weight_"
O_PROJ = LAYER + "self_attn.o_proj.weight"


def put(folder, head, data, text=None, claim=None):
    text = (json.dumps(head) if text is None else text).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text) if claim is None else claim) + text + data)


def edit(fn):
    def do(folder, head, data):
        data = bytearray(data)
        put(folder, fn(head, data) or head, bytes(data))
    return do


def offsets(head, name, lo, hi):
    head[name]["data_offsets"] = [head[name]["data_offsets"][0] + lo, head[name]["data_offsets"][1] + hi]


def shape(head, _):
    head[O_PROJ]["shape"].reverse()


def nan(head, data):
    struct.pack_into("<H", data, head[EXPERT + "scale"]["data_offsets"][0], 0x7FC0)


def index(folder, head, data):
    os.rename(os.path.join(folder, "model.safetensors"), os.path.join(folder, "one.safetensors"))
    names = {n: "one.safetensors" for n in head if n != "__metadata__"}
    names[O_PROJ] = "two.safetensors"
    json.dump({"weight_map": names}, open(os.path.join(folder, "model.safetensors.index.json"), "w"))


def twice(folder, head, data):
    text = json.dumps(head)
    put(folder, None, data, text[:-1] + ", " + json.dumps({O_PROJ: head[O_PROJ]})[1:])


def gguf(folder, head, data):
    with open(os.path.join(folder, "m.gguf"), "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))


# name, command, what to do, what the message says
DAMAGE = [
    ("truncated shard", "inspect", lambda f, h, d: put(f, h, d[:-1000]), "truncated"),
    ("header lies about its length", "inspect", lambda f, h, d: put(f, h, d, claim=len(json.dumps(h)) - 5), "model.safetensors"),
    ("header of 2 GB claimed", "inspect", lambda f, h, d: put(f, h, d, claim=2 << 30), "2147483648"),
    ("offsets past the end", "inspect", edit(lambda h, d: offsets(h, O_PROJ, 1 << 40, 1 << 40)), O_PROJ),
    ("offsets against the shape", "inspect", edit(lambda h, d: offsets(h, O_PROJ, 0, -2)), O_PROJ),
    ("overlapping tensors", "inspect", edit(lambda h, d: offsets(h, O_PROJ, -16, -16)), "overlap"),
    ("missing expert", "inspect", edit(lambda h, d: {k.replace(EXPERT, LAYER + "mlp.other."): v for k, v in h.items()}), "experts.7.up_proj"),
    ("transposed shape", "inspect", edit(shape), O_PROJ),
    ("duplicate names", "inspect", twice, O_PROJ),
    ("index names an absent file", "inspect", index, "two.safetensors"),
    ("NaN scale", "extract", edit(nan), "experts.7.up_proj"),
    ("GGUF with absurd counts", "inspect", gguf, "cannot hold"),
]


def limit():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))


def run(sluice, what, model, out):
    cmd = [sluice, "inspect", model]
    if what == "extract":
        cmd = [sluice, "extract", "--model", model, "--input", os.path.join(model, "rows.jsonl"), "--output", out, "--backend", "cpu"]
    return subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit, timeout=900, check=False)


def main():
    sluice, golden = sys.argv[1:3]
    raw = open(os.path.join(golden, "model.safetensors"), "rb").read()
    (n,) = struct.unpack_from("<Q", raw)
    failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "out")
        for name, what, damage, says in DAMAGE:
            model = os.path.join(tmp, "model")
            shutil.copytree(golden, model)
            damage(model, json.loads(raw[8:8 + n]), raw[8 + n:])
            r = run(sluice, what, os.path.join(model, "m.gguf") if "GGUF" in name else model, out)
            said = r.stderr.decode()
            ok = r.returncode == 78 and says in said
            failed += not ok
            lines = [x for x in said.splitlines() if says in x] or said.splitlines()
            print("%-30s exit %d %s  %s" % (name, r.returncode, "ok" if ok else "WRONG", lines[0][:160] if lines else ""))
            shutil.rmtree(model)
        r = run(sluice, "extract", golden, out)
        ok = r.returncode == 0
        failed += not ok
        print("%-30s exit %d %s" % ("the sound one", r.returncode, "ok" if ok else "WRONG\n" + r.stderr.decode()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
