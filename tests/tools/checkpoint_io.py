"""Reading and writing small safetensors checkpoints, for the tools beside this file. Standard library only."""
import array, json, os, struct


def read_file(path, out):
    b = open(path, "rb").read()
    n = struct.unpack("<Q", b[:8])[0]
    for k, v in json.loads(b[8:8 + n]).items():
        if k == "__metadata__": continue
        lo, hi = v["data_offsets"]
        d = b[8 + n + lo:8 + n + hi]
        if v["dtype"] == "F32": a = array.array("f", d)
        elif v["dtype"] == "BF16":
            a = array.array("f", array.array("I", [x << 16 for x in array.array("H", d)]).tobytes())
        elif v["dtype"] == "U8": a = array.array("B", d)
        else: continue
        out[k] = (v["shape"], a)


def read_checkpoint(path):
    out = {}
    for f in sorted(os.listdir(path)):
        if f.startswith("model") and f.endswith(".safetensors"): read_file(os.path.join(path, f), out)
    return out


def write_checkpoint(path, config, tensors):
    os.makedirs(path, exist_ok=True)
    head, data = {}, bytearray()
    for name, (shape, a) in tensors.items():
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(a)]}
        data += a.tobytes()
    h = json.dumps(head).encode()
    h += b" " * (-len(h) % 8)
    open(os.path.join(path, "model.safetensors"), "wb").write(struct.pack("<Q", len(h)) + h + data)
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    json.dump(config, open(os.path.join(path, "config.json"), "w"))
