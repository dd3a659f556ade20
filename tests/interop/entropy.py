#!/usr/bin/env python3
"""What a predictor could save on the states of a store: bits an element of the exponents and the sign, alone and when the
state captured before is known.

    tests/interop/entropy.py STORE        (any layout; bf16 states; needs numpy and zstandard)

Order-0 entropies over all rows: what an ideal coder without other context needs. Huffman codes need a few hundredths more.
"""
import os, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
sys.dont_write_bytecode = True
import numpy as np
from sluice_reader import Store


def bits(x, given=None):
    """Entropy of the numbers in x (0..65535), or what is left of it when those in `given` are known."""
    joint = x.ravel() if given is None else given.ravel() * 65536 + x.ravel()
    count = np.unique(joint, return_counts=True)[1] / joint.size
    h = -(count * np.log2(count)).sum()
    return h if given is None else h - bits(given)


def main():
    store = Store(sys.argv[1])
    x = np.concatenate([store[i].states() for i in range(len(store))])
    x = np.ascontiguousarray(x).view("<u4").astype(np.int64) >> 16  # float32 of bf16: the upper half
    exponent, sign = x >> 7 & 255, x >> 15
    biased = (exponent - np.median(exponent, axis=0).astype(np.int64)) % 256
    print(f"{x.shape[0]} tokens, {x.shape[1]} states, width {x.shape[2]}; bits an element of 16")
    print("state  exponent  with a bias a channel  minus the state before  given the state before  sign given the state before")
    for k in range(x.shape[1]):
        line = f"{k:5}  {bits(exponent[:, k]):8.3f}  {bits(biased[:, k]):21.3f}"
        if k:
            line += f"  {bits((exponent[:, k] - exponent[:, k - 1]) % 256):22.3f}  {bits(biased[:, k], biased[:, k - 1]):22.3f}  {bits(sign[:, k], sign[:, k - 1]):27.3f}"
        print(line)


if __name__ == "__main__":
    main()
