#!/usr/bin/env python3
"""Writes tokenizer_cases.json: tiny tokenizers, one feature each, with the ids and token starts that the PyPI package `tokenizers`
gives. Run: python3 make_tokenizer_cases.py > tokenizer_cases.json   (needs: pip install tokenizers)
"""
import copy
import itertools
import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = ["the cat sat on the mat and the dog sat on the log", "Hello, world! It's 2024; don't panic.", "naïve café Straße 你好世界 你好",
          "def f(x):\n    return x + 1\n\n", "aaaa aaa aa a", "one two  three   four", "<s> </s> test tests testing 12 123 1234"] * 4
TEXTS = ["", " ", "a", "the cat", " the cat", "the  cat   sat", "Hello, world!", "It's the cats' 1234 logs", "naïve café", "nai\u0308ve cafe\u0301",
         "你好 世界", "x\n\n\ny \t z", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
         "<tok>the<tok> cat <tok>", "a<word>b <word> c<word>", "  <left>  x  <right>  y", "<left><right>   <left>", "éclair<nfc>e\u0301clair",
         "🙂 ok 🙂🙂", "▁the▁cat", "€ § unknown ☃☃ x☃", "foo.bar,baz--qux", "the\u00a0cat\u3000sat", "<tok", "<<tok>>", "1<tok>2 3", "\u1100\u1161 \u212b"]
ADDED = [("<tok>", dict(special=True)), ("<word>", dict(single_word=True, normalized=False)), ("<left>", dict(lstrip=True, special=True, normalized=False)),
         ("<right>", dict(rstrip=True, special=True, normalized=False)), ("<nfc>e\u0301", dict(normalized=True)), ("cat s", dict(normalized=True))]


def train(byte_level):
    tok = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    if byte_level:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
        tok.train_from_iterator(CORPUS, trainer)
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        bytes_ = [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<unk>", "<s>"] + bytes_, show_progress=False)
        tok.train_from_iterator(CORPUS, trainer)
    return json.loads(tok.to_str())


def variants():
    byte, char = train(True), train(False)
    for j in (byte, char):
        j["added_tokens"] = []
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

    def v(name, base, **changes):
        j = copy.deepcopy(base)
        model = changes.pop("model", {})
        added = changes.pop("added", [])
        j.update(changes)
        j["model"].update(model)
        top = max(j["model"]["vocab"].values()) + 1
        j["added_tokens"] = [{"id": top + i, "content": c, "special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, **f}
                             for i, (c, f) in enumerate(added)]
        return name, j

    seq = lambda *s: {"type": "Sequence", "pretokenizers": list(s)}
    yield v("gpt2", byte, pre_tokenizer={**level, "use_regex": True})
    yield v("gpt2 prefix space", byte, pre_tokenizer={**level, "use_regex": True, "add_prefix_space": True}, added=ADDED)
    yield v("no split", byte, pre_tokenizer=level)
    yield v("whole piece", byte, pre_tokenizer={**level, "use_regex": True}, model={"ignore_merges": True})
    yield v("old merges", byte, pre_tokenizer=level, model={"merges": [" ".join(m) for m in byte["model"]["merges"]]})
    yield v("nfc", byte, normalizer={"type": "NFC"}, pre_tokenizer={**level, "use_regex": True}, added=ADDED)
    yield v("digits", byte, pre_tokenizer=seq({"type": "Digits", "individual_digits": True}, {**level, "use_regex": True}), added=ADDED)
    yield v("digits together", byte, pre_tokenizer=seq({"type": "Digits", "individual_digits": False}, level))
    yield v("punctuation", byte, pre_tokenizer=seq({"type": "Punctuation", "behavior": "Contiguous"}, level))
    yield v("white space", byte, pre_tokenizer=seq({"type": "WhitespaceSplit"}, level), added=ADDED)
    yield v("white space, prefix", byte, pre_tokenizer=seq({"type": "WhitespaceSplit"}, {**level, "add_prefix_space": True}))
    for how, invert, (kind, pat) in itertools.product(["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"], [False, True],
                                                      [("Regex", "\\s|at"), ("String", "a")]):
        yield v(f"split {how} {invert} {kind}", byte, pre_tokenizer=seq({"type": "Split", "pattern": {kind: pat}, "behavior": how, "invert": invert}, level))
    yield v("set", byte, pre_tokenizer=seq({"type": "Split", "pattern": {"Regex": "[\\p{L}&&[^a-e]]+|\\S"}, "behavior": "Isolated", "invert": False}, level))
    yield v("template", byte, pre_tokenizer=level, post_processor={
        "type": "Sequence", "processors": [{**level}, {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "B", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"A": {"id": "A", "ids": [1, 2], "tokens": ["x", "y"]}, "B": {"id": "B", "ids": [3], "tokens": ["z"]}}}]})
    back = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    for scheme, split in itertools.product(["always", "first", "never"], [True, False]):
        yield v(f"metaspace {scheme} {split}", char, model=back, added=ADDED,
                pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    yield v("llama", char, model=back, normalizer=llama, pre_tokenizer=None, added=ADDED)
    yield v("replace regex", char, model=back, pre_tokenizer=None,
            normalizer={"type": "Replace", "pattern": {"Regex": " {2,}|\\n"}, "content": "▁▁"})
    yield v("unknown fused", char, model={"byte_fallback": False, "unk_token": "<unk>", "fuse_unk": True}, normalizer=llama, pre_tokenizer=None)
    yield v("unknown single", char, model={"byte_fallback": False, "unk_token": "<unk>", "fuse_unk": False}, normalizer=llama, pre_tokenizer=None)
    yield v("unknown dropped", char, model={"byte_fallback": False, "unk_token": None}, normalizer=llama, pre_tokenizer=None)


def main():
    out = []
    for name, j in variants():
        tok = Tokenizer.from_str(json.dumps(j))
        cases = []
        for text in TEXTS:
            plain, special = tok.encode(text, add_special_tokens=False), tok.encode(text, add_special_tokens=True)
            tok.encode_special_tokens = True
            literal = tok.encode(text, add_special_tokens=False).ids
            tok.encode_special_tokens = False
            at = [len(text[:a].encode()) for a, _ in plain.offsets]
            cases.append({"text": text, "ids": plain.ids, "special": special.ids, "literal": literal, "at": at})
        out.append({"name": name, "tokenizer": j, "cases": cases})
    print("[" + ",\n".join(json.dumps(o, ensure_ascii=False, separators=(",", ":")) for o in out) + "]")


main()
