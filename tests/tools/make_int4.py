#!/usr/bin/env python3
"""Pack a small dense checkpoint into INT4 as compressed-tensors does, for tests. Standard library only.

    make_int4.py CHECKPOINT OUT --group G|channel [--asymmetric] [--scale bf16|f16|f32] [--dequantized DIR]

Every linear weight of the decoder becomes weight_packed (8 nibbles an int32 along the columns, lowest bits first),
weight_scale, weight_shape and, asymmetric, weight_zero_point (8 rows an int32). Scales are powers of two, so that a
dequantized weight is the same number however it is rounded. --dequantized DIR: the checkpoint of what the packed weights
stand for, in F32.
"""
import array, json, math, os, struct, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from checkpoint_io import read_checkpoint, write_checkpoint


def pack(shape, a, group, asym):
    n, k = shape
    g = k if group == "channel" else int(group)
    words, scales, zeros, back = array.array("i"), [], [], array.array("f")
    for r in range(n):
        row = []
        for c in range(0, k, g):
            x = a[r * k + c:r * k + c + g]
            span = max(max(x) - min(x), 1e-9) / 15 if asym else max(max(map(abs, x)), 1e-9) / 7
            s = 2.0 ** math.ceil(math.log2(span))
            z = max(0, min(15, round(-min(x) / s))) if asym else 8
            q = [max(0, min(15, round(v / s) + z)) for v in x]
            row += q
            scales.append(s)
            zeros.append(z)
            back.extend((v - z) * s for v in q)
        for c in range(0, k, 8):
            w = sum(row[c + j] << 4 * j for j in range(8))
            words.append(w - (1 << 32) if w >= 1 << 31 else w)
    cols = k // g
    zp = array.array("i")
    for r in range(0, n, 8):
        for c in range(cols):
            w = sum(zeros[(r + j) * cols + c] << 4 * j for j in range(8) if r + j < n)
            zp.append(w - (1 << 32) if w >= 1 << 31 else w)
    return words, scales, zp, back, cols


def main():
    arg, opt, asym, it = [], {"--group": "32", "--scale": "bf16", "--dequantized": None}, False, iter(sys.argv[1:])
    for a in it:
        if a == "--asymmetric": asym = True
        elif a in opt: opt[a] = next(it)
        else: arg.append(a)
    src, out = arg
    config, t = json.load(open(os.path.join(src, "config.json"))), read_checkpoint(src)
    head, data, back = {}, bytearray(), {}

    def put(name, dtype, shape, b):
        data.extend(bytes(-len(data) % 4))  # keep ints aligned; the pad becomes a tensor, as the format allows no gap
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(b)]}
        data.extend(b)
        if len(data) % 4:
            head["vision_tower.pad%d" % len(data)] = {"dtype": "U8", "shape": [2], "data_offsets": [len(data), len(data) + 2]}
            data.extend(b"\0\0")

    for name, (shape, a) in t.items():
        back[name] = (shape, a)
        if "_proj.weight" not in name:
            put(name, "F32", shape, a.tobytes())
            continue
        words, scales, zp, y, cols = pack(shape, a, opt["--group"], asym)
        base, n = name[:-len(".weight")], shape[0]
        put(base + ".weight_packed", "I32", [n, shape[1] // 8], words.tobytes())
        if opt["--scale"] == "bf16": s = b"".join(struct.pack("<f", v)[2:] for v in scales)
        else: s = struct.pack("<%d%s" % (len(scales), "e" if opt["--scale"] == "f16" else "f"), *scales)
        put(base + ".weight_scale", opt["--scale"].upper(), [n, cols], s)
        put(base + ".weight_shape", "I32", [2], struct.pack("<ii", *shape))
        if asym: put(base + ".weight_zero_point", "I32", [(n + 7) // 8, cols], zp.tobytes())
        back[name] = (shape, y)
    os.makedirs(out, exist_ok=True)
    h = json.dumps(head).encode()
    h += b" " * (-len(h) % 8)
    open(os.path.join(out, "model.safetensors"), "wb").write(struct.pack("<Q", len(h)) + h + data)
    channel = opt["--group"] == "channel"
    w = {"num_bits": 4, "type": "int", "symmetric": not asym, "strategy": "channel" if channel else "group", "group_size": None if channel else int(opt["--group"]), "actorder": None}
    q = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": w, "input_activations": None, "output_activations": None}}}
    json.dump(dict(config, quantization_config=q), open(os.path.join(out, "config.json"), "w"))
    if opt["--dequantized"]: write_checkpoint(opt["--dequantized"], config, back)


main()
