#!/usr/bin/env python3
"""A checkpoint in the shape of Kimi-K2.5 with few layers and random weights, as sharded safetensors.

    make_k25.py DIR [--moe-layers 2] [--experts 384] [--vocab 163840] [--rows 4] [--seed 1]

One dense layer and --moe-layers layers of experts at the real widths: hidden 7168, 64 heads of MLA, experts of width 2048 in
INT4 with groups of 32 and bf16 scales, everything else bf16, names with the `language_model.` prefix, one shard a layer. Inside a
shard tensors lie as the usual writer puts them: by element size, then by name, so expert 10 comes before expert 2. The two
layers of the real count take 19 GB, the rest 7 GB. Next to it rows.jsonl: --rows rows of random ids. Standard library only.
"""
import argparse
import json
import os
import random
import struct
import sys

H, HEADS, NOPE, ROPE, V, Q_LORA, KV_LORA, DENSE, INTER, GROUP = 7168, 64, 128, 64, 128, 1536, 512, 18432, 2048, 32
MAX = 64 << 20
# High bytes of bf16 values: both signs, magnitudes of 2^-8 and below; and of scales, all positive, 0.002 to 0.008.
WEIGHT = bytes([0x3B, 0x3C, 0xBB, 0xBC][i & 3] for i in range(256))
SCALE = bytes([0x3B]) * 256
NORM = bytes([0x3F]) * 256  # 0.5 .. 2


def config(a):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False,
               "actorder": None, "observer": "minmax"}
    text = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False, "bos_token_id": 0,
        "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": H, "intermediate_size": DENSE,
        "kv_lora_rank": KV_LORA, "max_position_embeddings": 262144, "moe_intermediate_size": INTER, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": a.experts, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS,
        "num_experts_per_tok": 8, "num_hidden_layers": 1 + a.moe_layers, "num_key_value_heads": HEADS, "num_nextn_predict_layers": 0,
        "q_lora_rank": Q_LORA, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": V, "vocab_size": a.vocab,
        "rope_scaling": {"type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096},
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None,
                                          "weights": weights}}}}
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
            "vision_config": {"model_type": "kimi_k25_vision"}, "tie_word_embeddings": False}


def bf16(shape, table=WEIGHT):
    return ("BF16", shape, table)


def layer(n, a):
    t, p = {}, "language_model.model.layers.%d." % n
    at, mlp = p + "self_attn.", p + "mlp."
    for name in ("input_layernorm", "post_attention_layernorm"):
        t[p + name + ".weight"] = bf16([H], NORM)
    t[at + "q_a_layernorm.weight"] = bf16([Q_LORA], NORM)
    t[at + "kv_a_layernorm.weight"] = bf16([KV_LORA], NORM)
    t[at + "q_a_proj.weight"] = bf16([Q_LORA, H])
    t[at + "q_b_proj.weight"] = bf16([HEADS * (NOPE + ROPE), Q_LORA])
    t[at + "kv_a_proj_with_mqa.weight"] = bf16([KV_LORA + ROPE, H])
    t[at + "kv_b_proj.weight"] = bf16([HEADS * (NOPE + V), KV_LORA])
    t[at + "o_proj.weight"] = bf16([H, HEADS * V])
    dense, width = (mlp, DENSE) if n == 0 else (mlp + "shared_experts.", INTER)
    for name, shape in (("gate_proj", [width, H]), ("up_proj", [width, H]), ("down_proj", [H, width])):
        t[dense + name + ".weight"] = bf16(shape)
        for e in range(a.experts if n else 0):
            q, k = (INTER, H) if name != "down_proj" else (H, INTER)
            w = "%sexperts.%d.%s.weight_" % (mlp, e, name)
            t[w + "packed"] = ("I32", [q, k // 8], None)
            t[w + "scale"] = bf16([q, k // GROUP], SCALE)
            t[w + "shape"] = ("I32", [2], (q, k))
    if n:
        t[mlp + "gate.weight"] = bf16([a.experts, H])
        t[mlp + "gate.e_score_correction_bias"] = ("F32", [a.experts], None)
    return t


def chunks(rng, dtype, shape, how, size):
    if dtype == "F32":
        yield struct.pack("<%df" % shape[0], *(rng.gauss(0, 0.05) for _ in range(shape[0])))
    elif dtype == "I32" and how:
        yield struct.pack("<2i", *how)
    else:
        for at in range(0, size, MAX):
            b = bytearray(rng.randbytes(min(MAX, size - at)))
            if how:
                b[1::2] = b[1::2].translate(how)
            yield b


def write(path, tensors, rng):
    order = sorted(tensors, key=lambda n: (tensors[n][0] == "BF16", n))
    head, at = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        dtype, shape, _ = tensors[name]
        size = 2 if dtype == "BF16" else 4
        for d in shape:
            size *= d
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            dtype, shape, how = tensors[name]
            lo, hi = head[name]["data_offsets"]
            for piece in chunks(rng, dtype, shape, how, hi - lo):
                f.write(piece)
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return at


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("dir")
    ap.add_argument("--moe-layers", type=int, default=2)
    ap.add_argument("--experts", type=int, default=384)
    ap.add_argument("--vocab", type=int, default=163840)
    ap.add_argument("--rows", type=int, default=4)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    rng = random.Random(a.seed)
    os.makedirs(a.dir, exist_ok=True)
    parts = [layer(n, a) for n in range(1 + a.moe_layers)]
    parts[0]["language_model.model.embed_tokens.weight"] = bf16([a.vocab, H])
    parts.append({"language_model.model.norm.weight": bf16([H], NORM), "language_model.lm_head.weight": bf16([a.vocab, H])})
    where, total = {}, 0
    for i, tensors in enumerate(parts):
        name = "model-%05d-of-%06d.safetensors" % (i + 1, len(parts))
        total += write(os.path.join(a.dir, name), tensors, rng)
        where.update((t, name) for t in tensors)
        print("%s: %.1f GB so far" % (name, total / 1e9), file=sys.stderr)
    with open(os.path.join(a.dir, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": where}, f)
    with open(os.path.join(a.dir, "config.json"), "w") as f:
        json.dump(config(a), f, indent=1)
    with open(os.path.join(a.dir, "rows.jsonl"), "w") as f:
        for i in range(a.rows):
            f.write(json.dumps({"input_ids": [rng.randrange(a.vocab) for _ in range(5 + 16 * i)]}) + "\n")


if __name__ == "__main__":
    main()
