#!/usr/bin/env python3
"""llama.cpp's prompt processing on SmolLM2-135M's shape, the peer of `sluice bench forward`.

Writes a GGUF with random weights of that shape (embedding tied, so no output matrix) and times llama.cpp (PyPI
llama-cpp-python) on it: one JSON object a line with threads, tokens, tok/s by the wall clock and by processor time (the
one to compare with one thread on a busy machine). The best of several runs counts.

    llama_pp.py [--gguf FILE] [--type bf16|f16|f32] [--threads 1,2] [--tokens 512] [--runs 6]
"""
import argparse
import json
import os
import struct
import sys
import tempfile
import time

import numpy as np

H, LAYERS, HEADS, KV, HEAD_DIM, INTER, VOCAB = 576, 30, 9, 3, 64, 1536, 49152
TYPES = {"f32": (0, 0), "f16": (1, 1), "bf16": (30, 32)}  # ggml type, general.file_type


def gguf_string(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def key_value(key, kind, value):
    out = gguf_string(key)
    if kind == "u32":
        return out + struct.pack("<II", 4, value)
    if kind == "f32":
        return out + struct.pack("<If", 6, value)
    if kind == "str":
        return out + struct.pack("<I", 8) + gguf_string(value)
    if kind == "strs":
        return out + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    if kind == "i32s":
        return out + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack("<%di" % len(value), *value)
    raise ValueError(kind)


def tensors(kind):
    yield "token_embd.weight", (VOCAB, H), kind
    for i in range(LAYERS):
        b = "blk.%d." % i
        yield b + "attn_norm.weight", (H,), "f32"
        yield b + "attn_q.weight", (HEADS * HEAD_DIM, H), kind
        yield b + "attn_k.weight", (KV * HEAD_DIM, H), kind
        yield b + "attn_v.weight", (KV * HEAD_DIM, H), kind
        yield b + "attn_output.weight", (H, HEADS * HEAD_DIM), kind
        yield b + "ffn_norm.weight", (H,), "f32"
        yield b + "ffn_gate.weight", (INTER, H), kind
        yield b + "ffn_up.weight", (INTER, H), kind
        yield b + "ffn_down.weight", (H, INTER), kind
    yield "output_norm.weight", (H,), "f32"


def encode(x, kind):
    if kind == "f32":
        return x.astype("<f4").tobytes()
    if kind == "f16":
        return x.astype("<f2").tobytes()
    u = x.astype("<f4").view("<u4").astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_gguf(path, kind):
    # A byte-level vocabulary: llama.cpp wants every byte to have a token, the rest are fillers.
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    chars, extra = {}, 0
    for b in range(256):
        if b in printable:
            chars[b] = chr(b)
        else:
            chars[b], extra = chr(256 + extra), extra + 1
    vocab = [chars[b] for b in range(256)] + ["filler_%d" % i for i in range(VOCAB - 256)]
    meta = [
        ("general.architecture", "str", "llama"), ("general.name", "str", "random 135M"),
        ("general.file_type", "u32", TYPES[kind][1]), ("llama.context_length", "u32", 8192),
        ("llama.embedding_length", "u32", H), ("llama.block_count", "u32", LAYERS),
        ("llama.feed_forward_length", "u32", INTER), ("llama.attention.head_count", "u32", HEADS),
        ("llama.attention.head_count_kv", "u32", KV), ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("llama.rope.dimension_count", "u32", HEAD_DIM), ("llama.rope.freq_base", "f32", 1e5),
        ("llama.vocab_size", "u32", VOCAB), ("tokenizer.ggml.model", "str", "gpt2"), ("tokenizer.ggml.pre", "str", "smollm"),
        ("tokenizer.ggml.tokens", "strs", vocab), ("tokenizer.ggml.token_type", "i32s", [1] * VOCAB),
        ("tokenizer.ggml.merges", "strs", ["a b"]), ("tokenizer.ggml.bos_token_id", "u32", 0),
        ("tokenizer.ggml.eos_token_id", "u32", 0),
    ]
    info, offset, plan = b"", 0, list(tensors(kind))
    for name, shape, t in plan:
        size = int(np.prod(shape)) * (4 if t == "f32" else 2)
        info += gguf_string(name) + struct.pack("<I", len(shape)) + struct.pack("<%dQ" % len(shape), *reversed(shape))
        info += struct.pack("<IQ", TYPES[t][0], offset)
        offset += (size + 31) // 32 * 32
    rng = np.random.default_rng(7)
    with open(path, "wb") as f:
        f.write(struct.pack("<4sIQQ", b"GGUF", 3, len(plan), len(meta)))
        f.write(b"".join(key_value(*m) for m in meta) + info)
        f.write(b"\0" * (-f.tell() % 32))
        for name, shape, t in plan:
            x = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape, dtype=np.float32) * 0.04
            data = encode(np.asarray(x), t)
            f.write(data + b"\0" * (-len(data) % 32))


def measure(path, threads, tokens, runs):
    from llama_cpp import Llama

    llm = Llama(path, n_ctx=max(tokens, 512), n_batch=tokens, n_ubatch=tokens, n_threads=threads, n_threads_batch=threads,
                use_mmap=True, verbose=False)
    ids, best, best_cpu = [(i * 7919) % VOCAB for i in range(tokens)], 0.0, 0.0
    for _ in range(runs + 1):  # the first warms up
        llm.reset()
        start, cpu = time.perf_counter(), time.process_time()
        llm.eval(ids)
        best = max(best, tokens / (time.perf_counter() - start))
        best_cpu = max(best_cpu, tokens * threads / (time.process_time() - cpu))
    return best, best_cpu


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--gguf", help="where to keep the file (default: a temporary one)")
    ap.add_argument("--type", default="bf16", choices=sorted(TYPES))
    ap.add_argument("--threads", default="1,2")
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--runs", type=int, default=6)
    a = ap.parse_args()
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        print("SKIPPED: the Python package llama-cpp-python is not installed", file=sys.stderr)
        return 77
    path = a.gguf or os.path.join(tempfile.mkdtemp(), "random-135m-%s.gguf" % a.type)
    if not os.path.exists(path):
        write_gguf(path, a.type)
    for t in a.threads.split(","):
        rate, cpu = measure(path, int(t), a.tokens, a.runs)
        print(json.dumps({"peer": "llama.cpp", "type": a.type, "threads": int(t), "tokens": a.tokens, "tok_s": round(rate, 1),
                          "tok_s_cpu_time": round(cpu, 1)}),
              flush=True)
    if not a.gguf:
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
