#!/usr/bin/env python3
"""A GGUF file from a small Hugging Face checkpoint, for tests. Standard library only.

    make_gguf.py CHECKPOINT OUT.gguf [--type T] [--split-kv] [--pieces N] [--dequantized DIR]

T: f32 f16 bf16 (default) q8_0 q4_0 q4_1 q5_0 q5_1 mxfp4: the type of the linear weights (norms and biases stay F32; the
embedding and head too unless they fit). --split-kv writes MLA's kv_b as attn_k_b and attn_v_b. --pieces N writes
NAME-0000i-of-0000N.gguf. --dequantized DIR also writes a checkpoint folder whose weights are exactly what the quantized ones
stand for, in F32, so that a program that reads both must compute the same states from both.

Written from the published description of the format, independently of the program under test: names, the row order of q and
k in the llama architecture, Gemma's +1, the split of gate and up, and every block layout.
"""
import array, json, os, struct, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from checkpoint_io import read_checkpoint, write_checkpoint

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30, "mxfp4": 39}
FP4_EDGES = [.25, .75, 1.25, 1.75, 2.5, 3.5, 5]  # halfway between neighbours
FP4 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]


def f16(x): return struct.unpack("<e", struct.pack("<e", x))[0]


# ---- one row (list of floats) -> bytes, and the floats that the bytes stand for ----

def q8_0(x):
    d = f16(max(abs(v) for v in x) / 127)
    q = [max(-127, min(127, round(v / d))) if d else 0 for v in x]
    return struct.pack("<e32b", d, *q), [d * v for v in q]


def nibbles(q): return bytes(q[j] | q[j + 16] << 4 for j in range(16))


def q4_0(x):
    m = max(x, key=abs)
    d = f16(m / -8)
    q = [max(0, min(15, round(v / d) + 8)) if d else 8 for v in x]
    return struct.pack("<e", d) + nibbles(q), [d * (v - 8) for v in q]


def q4_1(x):
    lo = f16(min(x))
    d = f16((max(x) - lo) / 15)
    q = [max(0, min(15, round((v - lo) / d))) if d else 0 for v in x]
    return struct.pack("<ee", d, lo) + nibbles(q), [d * v + lo for v in q]


def five(q):
    high = sum((q[j] >> 4) << j for j in range(32))
    return struct.pack("<I", high) + nibbles([v & 15 for v in q])


def q5_0(x):
    m = max(x, key=abs)
    d = f16(m / -16)
    q = [max(0, min(31, round(v / d) + 16)) if d else 16 for v in x]
    return struct.pack("<e", d) + five(q), [d * (v - 16) for v in q]


def q5_1(x):
    lo = f16(min(x))
    d = f16((max(x) - lo) / 31)
    q = [max(0, min(31, round((v - lo) / d))) if d else 0 for v in x]
    return struct.pack("<ee", d, lo) + five(q), [d * v + lo for v in q]


def mxfp4(x):
    m, e = max(abs(v) for v in x), 0
    while e < 254 and 6 * 2.0 ** (e - 127) < m: e += 1
    s = 2.0 ** (e - 127)
    q = [sum(abs(v) > edge * s for edge in FP4_EDGES) | (8 if v < 0 else 0) for v in x]
    return bytes([e]) + nibbles(q), [FP4[c] * s for c in q]


BLOCK = {"q8_0": q8_0, "q4_0": q4_0, "q4_1": q4_1, "q5_0": q5_0, "q5_1": q5_1, "mxfp4": mxfp4}


def encode(a, row, kind):
    """Floats -> (kind used, bytes, array of what they stand for)."""
    if kind in BLOCK and row % 32: kind = "f16"
    if kind == "f32": return kind, a.tobytes(), a
    if kind == "bf16":
        u = array.array("I", a.tobytes())
        h = array.array("H", [((x + 0x7fff + (x >> 16 & 1)) >> 16) & 0xffff for x in u])
        return kind, h.tobytes(), array.array("f", array.array("I", [x << 16 for x in h]).tobytes())
    if kind == "f16":
        b = struct.pack(f"<{len(a)}e", *a)
        return kind, b, array.array("f", struct.unpack(f"<{len(a)}e", b))
    out, back = bytearray(), array.array("f")
    for i in range(0, len(a), 32):
        b, y = BLOCK[kind](a[i:i + 32])
        out += b
        back.extend(y)
    return kind, bytes(out), back


# ---- names and layouts ----

LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight", "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight", "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
ARCH = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
        "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss", "gemma3_text": "gemma3"}


class Maker:
    def __init__(self, path, kind, split_kv):
        self.c = json.load(open(os.path.join(path, "config.json")))
        self.t = read_checkpoint(path)
        self.kind, self.split_kv, self.arch = kind, split_kv, ARCH[self.c["model_type"]]
        self.out, self.back = [], {}  # (name, ne, kind, bytes); HF name -> (shape, floats)

    def add(self, name, shape, a, kind, hf=None):
        kind, b, back = encode(a, shape[-1], kind)
        self.out.append((name, list(reversed(shape)), kind, b))
        if hf: self.back[hf] = (shape, back)
        return back

    def permute(self, shape, a, heads):
        hd, row = shape[0] // heads, shape[1] if len(shape) > 1 else 1
        new = array.array("f", bytes(4 * len(a)))
        for h in range(heads):
            for i in range(hd):
                src = h * hd + (i // 2 + (i % 2) * (hd // 2))
                dst = h * hd + i
                new[dst * row:(dst + 1) * row] = a[src * row:(src + 1) * row]
        return new

    def unpermute(self, shape, a, heads):
        hd, row = shape[0] // heads, shape[1]
        new = array.array("f", bytes(4 * len(a)))
        for h in range(heads):
            for i in range(hd):
                src = h * hd + (i // 2 + (i % 2) * (hd // 2))
                dst = h * hd + i
                new[src * row:(src + 1) * row] = a[dst * row:(dst + 1) * row]
        return new

    def norm(self, a):
        return array.array("f", [v + 1 for v in a]) if self.arch == "gemma3" else a

    def experts(self, l, part, gguf):
        E = self.c.get("n_routed_experts") or self.c.get("num_local_experts") or self.c["num_experts"]
        names = [f"model.layers.{l}.mlp.experts.{e}.{part}.weight" for e in range(E)]
        shape, all_ = self.t[names[0]][0], array.array("f")
        for n in names: all_.extend(self.t.pop(n)[1])
        back = self.add(f"blk.{l}.{gguf}.weight", [E] + shape, all_, self.kind)
        n = shape[0] * shape[1]
        for e, name in enumerate(names): self.back[name] = (shape, back[e * n:(e + 1) * n])

    def oss_experts(self, l):
        p = f"model.layers.{l}.mlp.experts."
        E, I, H = self.c["num_local_experts"], self.c["intermediate_size"], self.c["hidden_size"]
        if p + "gate_up_proj_blocks" in self.t: gu, dn = self.unpack(p + "gate_up_proj", 2 * I, H), self.unpack(p + "down_proj", H, I)
        else:
            gu, dn = self.turn(self.t.pop(p + "gate_up_proj"), E), self.turn(self.t.pop(p + "down_proj"), E)
        gb, db = self.t.pop(p + "gate_up_proj_bias")[1], self.t.pop(p + "down_proj_bias")[1]
        for which, off in (("gate", 0), ("up", 1)):
            w, b = array.array("f"), array.array("f")
            for e in range(E):
                for i in range(I):
                    r = e * 2 * I + 2 * i + off
                    w.extend(gu[r * H:(r + 1) * H])
                    b.append(gb[r])
            self.add(f"blk.{l}.ffn_{which}_exps.weight", [E, I, H], w, self.kind)
            self.add(f"blk.{l}.ffn_{which}_exps.bias", [E, I], b, "f32")
        self.add(f"blk.{l}.ffn_down_exps.weight", [E, H, I], dn, self.kind)
        self.add(f"blk.{l}.ffn_down_exps.bias", [E, H], db, "f32")

    def turn(self, t, E):
        (_, k, n), a = t
        out = array.array("f")
        for e in range(E):
            m = a[e * k * n:(e + 1) * k * n]
            for j in range(n): out.extend(m[j::n])
        return out

    def unpack(self, name, n, k):
        b, s = self.t.pop(name + "_blocks")[1], self.t.pop(name + "_scales")[1]
        out = array.array("f")
        for i, e in enumerate(s):
            for v in b[i * 16:(i + 1) * 16]:
                out.append(FP4[v & 15] * 2.0 ** (e - 127))
                out.append(FP4[v >> 4] * 2.0 ** (e - 127))
        return out

    def kv_split(self, l, t):
        """kv_b [heads*(nope+v), lora] -> k_b [heads, lora, nope] (each head turned around) and v_b [heads, v, lora]."""
        c, (shape, a) = self.c, t
        h, nope, v, lora = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        k, w = array.array("f"), array.array("f")
        for i in range(h):
            m = a[i * (nope + v) * lora:(i + 1) * (nope + v) * lora]
            for j in range(lora): k.extend(m[j:nope * lora:lora])
            w.extend(m[nope * lora:])
        self.add(f"blk.{l}.attn_k_b.weight", [h, lora, nope], k, self.kind)
        self.add(f"blk.{l}.attn_v_b.weight", [h, v, lora], w, self.kind)

    def layer(self, l):
        p = f"model.layers.{l}."
        if any(k.startswith(p + "mlp.experts.0.") for k in self.t):
            for part, gguf in (("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")): self.experts(l, part, gguf)
        elif self.arch == "gpt-oss": self.oss_experts(l)
        names = dict(LAYER)
        if self.arch == "gemma3":
            names.update({"post_attention_layernorm.weight": "post_attention_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
                          "pre_feedforward_layernorm.weight": "ffn_norm.weight"})
        else: names["post_attention_layernorm.weight"] = "post_attention_norm.weight" if self.arch == "gpt-oss" else "ffn_norm.weight"
        for hf, gguf in names.items():
            for tail in ("", ".weight", ".bias") if "weight" not in hf else ("",):
                if p + hf + tail not in self.t: continue
                name = p + hf + tail
                shape, a = self.t.pop(name)
                linear = tail == ".weight" and gguf != "ffn_gate_inp"
                if "norm" in gguf: a = self.norm(a)
                if gguf == "attn_kv_b" and self.split_kv:
                    self.kv_split(l, (shape, a))
                    continue
                heads = {"attn_q": self.c["num_attention_heads"], "attn_k": self.c["num_key_value_heads"]}.get(gguf)
                turn = self.arch == "llama" and heads
                if turn: a = self.permute(shape, a, heads)
                back = self.add(f"blk.{l}.{gguf}{tail}", shape, a, self.kind if linear else "f32")
                if "norm" in gguf and self.arch == "gemma3": back = array.array("f", [v - 1 for v in back])
                self.back[name] = (shape, self.unpermute(shape, back, heads) if turn else back)

    def run(self):
        for l in range(self.c["num_hidden_layers"]): self.layer(l)
        for hf, gguf in (("model.embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", "output.weight")):
            if hf in self.t:
                shape, a = self.t.pop(hf)
                self.add(gguf, shape, a, self.kind if self.kind in ("f32", "f16", "bf16") else "q8_0", hf)
        shape, a = self.t.pop("model.norm.weight")
        self.add("output_norm.weight", shape, self.norm(a), "f32")
        self.back["model.norm.weight"] = (shape, a)
        rs = self.c.get("rope_scaling") or {}
        if self.arch == "llama" and rs.get("rope_type") == "llama3": self.divisors(rs)
        left = [k for k in self.t if "inv_freq" not in k and not k.startswith(f"model.layers.{self.c['num_hidden_layers']}.")]
        if left: raise SystemExit(f"not converted: {left[:5]}")

    def divisors(self, r):
        hd, out = self.c["head_dim"], array.array("f")
        for i in range(hd // 2):
            f = self.c["rope_theta"] ** (-2 * i / hd)
            wave, orig = 2 * 3.141592653589793 / f, r["original_max_position_embeddings"]
            lo, hi = r["low_freq_factor"], r["high_freq_factor"]
            if wave < orig / hi: d = 1
            elif wave > orig / lo: d = r["factor"]
            else:
                s = (orig / wave - lo) / (hi - lo)
                d = 1 / ((1 - s) / r["factor"] + s)
            out.append(d)
        self.add("rope_freqs.weight", [hd // 2], out, "f32")

    def metadata(self):
        c, A = self.c, self.arch
        kv = {"general.architecture": A, "general.name": "test", f"{A}.block_count": c["num_hidden_layers"],
              f"{A}.context_length": c["max_position_embeddings"], f"{A}.embedding_length": c["hidden_size"],
              f"{A}.feed_forward_length": c["intermediate_size"], f"{A}.attention.head_count": c["num_attention_heads"],
              f"{A}.attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]), f"{A}.vocab_size": c["vocab_size"]}
        rs = c.get("rope_scaling") or {}
        if A == "gemma3": kv[f"{A}.rope.freq_base"] = float(c["rope_parameters"]["full_attention"]["rope_theta"])
        else: kv[f"{A}.rope.freq_base"] = float(c["rope_theta"])
        if A == "gemma3":
            full = [i for i, t in enumerate(c["layer_types"]) if t == "full_attention"]
            kv[f"{A}.attention.sliding_window_pattern"] = full[0] + 1
        if A in ("gemma3", "gpt-oss"): kv[f"{A}.attention.sliding_window"] = c["sliding_window"]
        if (rs.get("type") or rs.get("rope_type")) == "yarn":
            kv[f"{A}.rope.scaling.type"], kv[f"{A}.rope.scaling.factor"] = "yarn", float(rs["factor"])
            kv[f"{A}.rope.scaling.original_context_length"] = rs["original_max_position_embeddings"]
            if A == "deepseek2": kv[f"{A}.rope.scaling.yarn_log_multiplier"] = 0.1 * rs["mscale_all_dim"]
        if A == "deepseek2":
            lora, dqk = c["kv_lora_rank"], c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
            if c["q_lora_rank"]: kv[f"{A}.attention.q_lora_rank"] = c["q_lora_rank"]
            kv.update({f"{A}.attention.kv_lora_rank": lora, f"{A}.rope.dimension_count": c["qk_rope_head_dim"],
                       f"{A}.leading_dense_block_count": c["first_k_dense_replace"], f"{A}.expert_count": c["n_routed_experts"],
                       f"{A}.expert_used_count": c["num_experts_per_tok"], f"{A}.expert_feed_forward_length": c["moe_intermediate_size"],
                       f"{A}.expert_shared_count": c["n_shared_experts"], f"{A}.expert_weights_scale": float(c["routed_scaling_factor"]),
                       f"{A}.expert_weights_norm": bool(c["norm_topk_prob"]), f"{A}.expert_gating_func": 2 if c["model_type"] == "deepseek_v3" else 1})
            if c["n_group"] > 1: kv.update({f"{A}.expert_group_count": c["n_group"], f"{A}.expert_group_used_count": c["topk_group"]})
            if self.split_kv:
                kv.update({f"{A}.attention.head_count_kv": 1, f"{A}.attention.key_length": lora + c["qk_rope_head_dim"], f"{A}.attention.value_length": lora,
                           f"{A}.attention.key_length_mla": dqk, f"{A}.attention.value_length_mla": c["v_head_dim"]})
            else:
                kv.update({f"{A}.attention.head_count_kv": c["num_attention_heads"], f"{A}.attention.key_length": dqk, f"{A}.attention.value_length": c["v_head_dim"]})
            return kv
        hd = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        kv.update({f"{A}.attention.head_count_kv": c["num_key_value_heads"], f"{A}.attention.key_length": hd, f"{A}.attention.value_length": hd, f"{A}.rope.dimension_count": hd})
        E = c.get("num_local_experts") or c.get("num_experts")
        if E: kv.update({f"{A}.expert_count": E, f"{A}.expert_used_count": c["num_experts_per_tok"], f"{A}.expert_feed_forward_length": c.get("moe_intermediate_size", c["intermediate_size"])})
        return kv


def string(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def value(v):
    if isinstance(v, bool): return struct.pack("<IB", 7, v)
    if isinstance(v, int): return struct.pack("<II", 4, v)
    if isinstance(v, float): return struct.pack("<If", 6, v)
    return struct.pack("<I", 8) + string(v)


def write_gguf(path, kv, tensors):
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(kv)) + b"".join(string(k) + value(v) for k, v in kv.items())
    at, data = 0, bytearray()
    for name, ne, kind, b in tensors:
        data += bytes(-len(data) % 32)
        head += string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, TYPES[kind], len(data))
        data += b
    open(path, "wb").write(head + bytes(-len(head) % 32) + data)


def main():
    arg, opt = [], {"--type": "bf16", "--pieces": "1", "--dequantized": None}
    it, split_kv = iter(sys.argv[1:]), False
    for a in it:
        if a == "--split-kv": split_kv = True
        elif a in opt: opt[a] = next(it)
        else: arg.append(a)
    if len(arg) != 2: raise SystemExit(__doc__)
    m = Maker(arg[0], opt["--type"], split_kv)
    m.run()
    kv, n = m.metadata(), int(opt["--pieces"])
    if n == 1: write_gguf(arg[1], kv, m.out)
    else:
        for i in range(n):
            part = dict(kv) if i == 0 else {"general.architecture": m.arch}
            part.update({"split.no": i, "split.count": n, "split.tensors.count": len(m.out)})
            write_gguf(f"{arg[1][:-5]}-{i + 1:05d}-of-{n:05d}.gguf", part, m.out[i::n])
    if opt["--dequantized"]: write_checkpoint(opt["--dequantized"], m.c, m.back)


main()
