"""Files that torch.load reads (also with mmap and weights_only), written without torch: a zip of stored entries, tensors aligned to 64
bytes, a pickle of protocol 2 that names only tensors, strings, numbers, lists and dicts."""
import struct
import zipfile

import numpy as np

_STORAGE = {"bf16": ("BFloat16Storage", 2), "float32": ("FloatStorage", 4), "int64": ("LongStorage", 8), "uint8": ("ByteStorage", 1), "bool": ("BoolStorage", 1)}


class Bf16:
    """bf16 bits (uint16 array) that is to be a bfloat16 tensor."""

    def __init__(self, bits):
        self.bits = np.ascontiguousarray(bits, dtype=np.uint16)


class _Pickle:
    def __init__(self):
        self.out, self.storages = [b"\x80\x02"], []

    def text(self, s):
        b = s.encode()
        self.out.append(b"X" + struct.pack("<I", len(b)) + b)

    def number(self, v):
        if 0 <= v < 256:
            self.out.append(b"K" + bytes([v]))
        elif -(1 << 31) <= v < 1 << 31:
            self.out.append(b"J" + struct.pack("<i", v))
        else:
            b = v.to_bytes((v.bit_length() + 8) // 8, "little", signed=True)
            self.out.append(b"\x8a" + bytes([len(b)]) + b)

    def tensor(self, x):
        name, size = ("bf16", x.bits) if isinstance(x, Bf16) else (x.dtype.name, np.ascontiguousarray(x))
        kind, _ = _STORAGE[name]
        data = size
        key = str(len(self.storages))
        self.storages.append(data)
        self.out.append(b"ctorch._utils\n_rebuild_tensor_v2\n((")
        self.text("storage")
        self.out.append(f"ctorch\n{kind}\n".encode())
        self.text(key)
        self.text("cpu")
        self.number(data.size)
        self.out.append(b"tQ")
        self.number(0)
        for shape in (data.shape, [int(np.prod(data.shape[i + 1:])) for i in range(data.ndim)]):
            self.out.append(b"(")
            for v in shape:
                self.number(int(v))
            self.out.append(b"t")
        self.out.append(b"\x89ccollections\nOrderedDict\n)RtR")

    def put(self, v):
        if isinstance(v, (Bf16, np.ndarray)):
            self.tensor(v)
        elif isinstance(v, bool):
            self.out.append(b"\x88" if v else b"\x89")
        elif isinstance(v, int):
            self.number(v)
        elif isinstance(v, str):
            self.text(v)
        elif isinstance(v, dict):
            self.out.append(b"}(")
            for k, x in v.items():
                self.put(k)
                self.put(x)
            self.out.append(b"u")
        elif isinstance(v, (list, tuple)):
            self.out.append(b"](")
            for x in v:
                self.put(x)
            self.out.append(b"e")
        else:
            raise TypeError(f"cannot save {type(v)}")


def save(path, value):
    p = _Pickle()
    p.put(value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as z:

        def entry(name, data):
            info = zipfile.ZipInfo("archive/" + name, (1980, 1, 1, 0, 0, 0))
            if len(data) > 0x7FFFFFFF:
                raise ValueError("a tensor of 2 GiB or more: split the row")
            pad = -(z.fp.tell() + 30 + len(info.filename) + 4) % 64
            info.extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
            z.writestr(info, data)

        entry("data.pkl", b"".join(p.out) + b".")
        entry("byteorder", b"little")
        for i, s in enumerate(p.storages):
            entry(f"data/{i}", s.tobytes())
        entry("version", b"3\n")
