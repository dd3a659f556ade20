#!/usr/bin/env python3
"""Write tests/data/tiny: a byte-level BPE tokenizer of 267 ids (256 bytes, six merges, five special tokens) with a chat
template, small enough to be read by eye and fit for the small golden models. Run by hand when it has to change."""
import json
import os

here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny")


def byte_letters():
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for code points from 256 on."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    out, extra = {}, 0
    for b in range(256):
        out[b] = chr(b) if b in keep else chr(256 + extra)
        extra += b not in keep
    return out


letters = byte_letters()
vocab = {letters[b]: b for b in range(256)}
merges = []
for pair in [("h", "i"), (" ", "a"), (":", " "), ("o", "k"), (" a", "b"), ("x", "y")]:
    a, b = ("".join(letters[x] for x in s.encode()) for s in pair)
    merges.append("%s %s" % (a, b))
    vocab[a + b] = len(vocab)
special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
added = [{"id": len(vocab) + i, "content": s, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
         for i, s in enumerate(special)]
tokenizer = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"[A-Za-z]+:? ?|\s*[^A-Za-z\s]+|\s+[A-Za-z]*"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                       "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                       "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [len(vocab)], "tokens": ["<|bos|>"]}}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
              "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}}
template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
os.makedirs(here, exist_ok=True)
json.dump(tokenizer, open(os.path.join(here, "tokenizer.json"), "w"), ensure_ascii=False, indent=1)
json.dump({"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"},
          open(os.path.join(here, "tokenizer_config.json"), "w"), ensure_ascii=False, indent=1)
