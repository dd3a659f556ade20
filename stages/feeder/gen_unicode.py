#!/usr/bin/env python3
"""Writes unicode_ranges.inc: the character classes that pre-tokenizer patterns ask for, as the reference engine sees them.

A pre-tokenizer is only right when its classes are those of the engine that trained the tokenizer, so the table is taken from the
`tokenizers` package itself (its regular expressions decide membership of each code point) and not from whatever Unicode version
a system library has. Run: python3 gen_unicode.py > unicode_ranges.inc   (needs: pip install tokenizers)
"""
import sys
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

TEXT = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
BITS = [("UPPER", r"[\p{Lu}\p{Lt}]"), ("LOWER", r"\p{Ll}"), ("OTHER", r"[\p{Lm}\p{Lo}]"), ("MARK", r"\p{M}"), ("NUM", r"\p{N}"),
        ("PUNCT", r"\p{P}"), ("SYM", r"\p{S}"), ("SPACE", r"\s"), ("HAN", r"\p{Han}"), ("WORD", r"\w"),
        ("MOVES", None)]


def moves():
    """Characters that NFC puts behind an overlay (class 1) that follows them. The reference's NFC may know an older Unicode than the
    library we compose with; a mark that only the latter knows must be left alone."""
    nfc = normalizers.NFC()
    return {ord(c) for c in TEXT if nfc.normalize_str(c + "\u0334") != c + "\u0334"}


def members(pattern):
    if pattern is None:
        return moves()
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return {ord(c) for piece, _ in split.pre_tokenize_str(TEXT) for c in piece}


def main():
    flags = [0] * 0x110000
    for bit, (_, pattern) in enumerate(BITS):
        for cp in members(pattern):
            flags[cp] |= 1 << bit
    print(f"/* Made by gen_unicode.py with tokenizers {tokenizers.__version__}; do not edit. {{first, last, flags}}; bits in order: "
          + " ".join(n for n, _ in BITS) + " */")
    line, start = "", 0
    for cp in range(1, 0x110001):
        if cp == 0x110000 or flags[cp] != flags[start]:
            if flags[start]:
                item = "{0x%x,0x%x,0x%x}," % (start, cp - 1, flags[start])
                if len(line) + len(item) > 118:
                    print(line)
                    line = ""
                line += item
            start = cp
    print(line)


sys.exit(main())
