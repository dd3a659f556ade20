"""The final norm of a model folder, for exports that want H[n] after it. Plain RMSNorm families only; anything else is refused."""
import json
import os
import struct

import numpy as np

from .store import StoreError, bf16_to_f32

# Families whose final norm is x / rms(x) * w, and those with x / rms(x) * (1 + w).
PLAIN = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "mixtral"}
PLUS_ONE = {"gemma", "gemma2", "gemma3", "gemma3_text"}


def to_bf16(x):
    """float32 -> bf16 bits, round to nearest even (NaN stays NaN)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    r = ((u + (0x7FFF + ((u >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, (u >> 16 | 0x40).astype(np.uint16), r)


def _tensor(folder, suffix):
    index = os.path.join(folder, "model.safetensors.index.json")
    files = sorted(set(json.load(open(index))["weight_map"].values())) if os.path.exists(index) else ["model.safetensors"]
    for name in files:
        with open(os.path.join(folder, name), "rb") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            head = json.loads(f.read(n))
            for key, t in head.items():
                if key != "__metadata__" and key in (suffix, "language_model." + suffix, "model.language_model." + suffix[6:]):
                    a, b = t["data_offsets"]
                    f.seek(8 + n + a)
                    raw = f.read(b - a)
                    if t["dtype"] == "BF16":
                        return bf16_to_f32(np.frombuffer(raw, np.uint16))
                    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[t["dtype"]]).astype(np.float32)
    raise StoreError(f"{folder}: no tensor {suffix}")


class FinalNorm:
    def __init__(self, folder):
        try:
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
                cfg = json.load(f)
        except OSError as e:
            raise StoreError(f"the final norm of {folder} cannot be read ({e}): capture with --final both or post instead, or give --model DIR") from e
        cfg = cfg.get("text_config", cfg)
        kind = cfg.get("model_type", "")
        if kind not in PLAIN | PLUS_ONE:
            raise StoreError(f"{folder}: the final norm of model_type '{kind}' is not known here: capture with --final both or post instead")
        self.plus_one, self.eps = kind in PLUS_ONE, float(cfg.get("rms_norm_eps", 1e-6))
        self.w = _tensor(folder, "model.norm.weight")

    def __call__(self, bits):
        """H[n] as stored (bf16 bits or float32) -> the same kind, after the norm, rounded where the reference rounds."""
        f32 = bits.dtype == np.float32
        x = bits if f32 else bf16_to_f32(bits)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(self.eps))
        if f32:
            return (y * (1 + self.w if self.plus_one else self.w)).astype(np.float32)
        if self.plus_one:
            return to_bf16(y * (1 + self.w))
        return to_bf16(bf16_to_f32(to_bf16(y)) * bf16_to_f32(to_bf16(self.w)))
