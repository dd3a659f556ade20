#!/usr/bin/env python3
"""Writes tokenizer_smollm2.json: texts with the ids that llama.cpp gives for SmolLM2's GGUF vocabulary.

Run: python3 make_tokenizer_smollm2.py SmolLM2-135M-Instruct.gguf > tokenizer_smollm2.json   (needs: pip install llama-cpp-python)
"""
import json
import os
import random
import sys

from llama_cpp import Llama

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "interop"))
import tokenizer_parity  # noqa: E402  its random texts

model = Llama(sys.argv[1], vocab_only=True, verbose=False)
rng = random.Random(7)
texts = ["", " ", "Hello, world!", "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", "it's 12345 o'clock\n\n\n  ok"]
texts += [tokenizer_parity.make(rng, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]).replace("\0", "") for _ in range(150)]
rows = [{"text": t, "ids": model.tokenize(t.encode(), add_bos=False, special=True) if t else []} for t in texts]
print("[" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "]")
