#!/usr/bin/env python3
"""What people run today on one GPU, timed the way sluice bench times itself: transformers models of a config's shape with
random bf16 weights, random ids, prefill only. One JSON object a line.

    peer_transformers.py forward SHAPE_DIR [--compile] [--rows 8 --length 2048 | --lengths 2048x4,512x8]
    peer_transformers.py capture SHAPE_DIR     four layers captured by hooks and torch.save'd, one file a sample
    peer_transformers.py layer SHAPE_DIR       one decoder layer with experts, bf16: (3 layers) - (2 layers)
    peer_transformers.py attention             torch's scaled_dot_product_attention with cuDNN
"""
import argparse, json, os, shutil, statistics, sys, tempfile, time
import torch

DEV = "cuda"


def timed(f, repeat, warmup=3):
    """Median seconds of f, each run synchronized, as a caller of the forward pass sees it."""
    for _ in range(warmup):
        f()
    torch.cuda.synchronize()
    out = []
    for _ in range(repeat):
        t0 = time.perf_counter()
        f()
        torch.cuda.synchronize()
        out.append(time.perf_counter() - t0)
    return statistics.median(out)


def build(shape, **changed):
    import transformers
    from transformers import AutoConfig, AutoModel
    j = json.load(open(os.path.join(shape, "config.json")))
    j = j.get("text_config", j)
    for key in ("quantization_config", "pad_token_id", "bos_token_id", "eos_token_id"):
        j.pop(key, None)
    j.update(changed)
    kind = {"kimi_k2": "deepseek_v3"}.get(j["model_type"], j["model_type"])
    j["model_type"] = kind
    config = AutoConfig.for_model(kind, **{k: v for k, v in j.items() if k not in ("model_type", "architectures", "torch_dtype")})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEV):
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    for p in model.parameters():
        if p.dim() >= 2:
            p.data.normal_(0, 0.02)
    return model, config, transformers.__version__


def lengths_of(a):
    if not a.lengths:
        return [a.length] * a.rows
    out = []
    for part in a.lengths.split(","):
        t, _, n = part.partition("x")
        out += [int(t)] * int(n or 1)
    return out


def batch(lengths, vocab):
    """Right-padded ids and mask, as a data collator makes them; no mask when nothing is padded."""
    S = max(lengths)
    ids = torch.randint(0, vocab, (len(lengths), S), device=DEV)
    mask = None
    if min(lengths) < S:
        mask = torch.zeros(len(lengths), S, dtype=torch.long, device=DEV)
        for i, T in enumerate(lengths):
            mask[i, :T] = 1
    return ids, mask


def forward(a):
    model, config, version = build(a.shape)
    lengths = lengths_of(a)
    ids, mask = batch(lengths, config.vocab_size)
    with torch.inference_mode():
        kw = dict(input_ids=ids, attention_mask=mask, use_cache=False)
        sec = {"eager": timed(lambda: model(**kw), a.repeat)}
        if a.compile:
            fast = torch.compile(model)
            sec["compile"] = timed(lambda: fast(**kw), a.repeat)
    for how, s in sec.items():
        print(json.dumps(dict(peer="transformers " + version, how=how, shape=os.path.basename(a.shape.rstrip("/")), lengths=a.lengths or f"{a.length}x{a.rows}",
                              tokens=sum(lengths), tok_s=round(sum(lengths) / s, 1))), flush=True)


def capture(a):
    model, config, version = build(a.shape)
    n = config.num_hidden_layers
    kept, hooks = {}, []
    layers = sorted({2, n // 2, n - 3, n - 1})
    for i in layers:
        hooks.append(model.layers[i].register_forward_hook(lambda m, x, o, i=i: kept.__setitem__(i, o[0] if isinstance(o, tuple) else o)))
    lengths = lengths_of(a)
    ids, mask = batch(lengths, config.vocab_size)
    folder = tempfile.mkdtemp(dir=a.dir)
    count = 0

    def step():
        nonlocal count
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        for b, T in enumerate(lengths):
            torch.save({"input_ids": ids[b, :T].cpu(), "loss_mask": torch.ones(T, dtype=torch.long),
                        "hidden_states": [kept[i][b, :T].clone().cpu() for i in layers]}, f"{folder}/data_{count}.pt")
            count += 1

    with torch.inference_mode():
        s = timed(step, a.repeat, warmup=1)
    shutil.rmtree(folder)
    print(json.dumps(dict(peer="transformers " + version, how="capture and torch.save", shape=os.path.basename(a.shape.rstrip("/")), lengths=a.lengths or f"{a.length}x{a.rows}",
                          tok_s=round(sum(lengths) / s, 1))), flush=True)


def layer(a):
    took = {}
    for n in (2, 3):
        model, config, version = build(a.shape, num_hidden_layers=n, vocab_size=1024, first_k_dense_replace=1)
        ids, _ = batch([a.length] * a.rows, 1024)
        with torch.inference_mode():
            took[n] = timed(lambda: model(input_ids=ids, use_cache=False), a.repeat)
        del model
        torch.cuda.empty_cache()
    s = took[3] - took[2]
    print(json.dumps(dict(peer="transformers " + version, how="one layer with experts, bf16", tokens=a.rows * a.length, ms=round(s * 1e3, 3),
                          tflop_s=round(2 * 500236288 * a.rows * a.length / s / 1e12, 1))), flush=True)


def attention(a):
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    mixed = lengths_of(a) if a.lengths else None
    for dqk, dv, h, hk in ((64, 64, 32, 8), (128, 128, 32, 8), (256, 256, 16, 8), (192, 128, 64, 64)):
        for b, s, rows in ((8, 2048, None), (2, 8192, None), *([(len(mixed), max(mixed), mixed)] if mixed else [])):
            q, k, v = (torch.randn(b, n, s, d, device=DEV, dtype=torch.bfloat16) for n, d in ((h, dqk), (hk, dqk), (hk, dv)))
            try:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.inference_mode():
                    f = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != hk)
                    sec = timed(lambda: [f() for _ in range(20)], a.repeat, warmup=1) / 20
                pairs = sum(n * n for n in rows or [s] * b)  # of real tokens: padding is time, not work
                print(json.dumps(dict(peer="torch SDPA cuDNN", dqk=dqk, dv=dv, rows=b, length=s, lengths=a.lengths if rows else None, ms=round(sec * 1e3, 4),
                                      tflop_s=round(h * pairs * (dqk + dv) / sec / 1e12, 1))), flush=True)
            except Exception as e:
                print(json.dumps(dict(peer="torch SDPA cuDNN", dqk=dqk, dv=dv, rows=b, length=s, error=str(e)[:120])), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("forward", "capture", "layer", "attention"))
    p.add_argument("shape", nargs="?")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--lengths")
    p.add_argument("--repeat", type=int, default=10)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--dir", default=tempfile.gettempdir(), help="where capture writes its files")
    a = p.parse_args()
    if a.what != "attention" and not a.shape:
        p.error("a shape folder is needed")
    torch.manual_seed(0)
    {"forward": forward, "capture": capture, "layer": layer, "attention": attention}[a.what](a)


if __name__ == "__main__":
    main()
