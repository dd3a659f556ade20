#!/usr/bin/env python3
"""gen_wgmma.py OUT: writes wgmma_ops.cuh: one struct per accumulator width, because inline asm needs its operands spelled out."""
import sys

def regs(n, base=0):
    return "{" + ",".join(f"%{base + i}" for i in range(n)) + "}"
def outs(n):
    return ", ".join(f'"+f"(d[{i}])' for i in range(n))
out = ["// Written by gen_wgmma.py; edit that instead.",
       "// Descriptors come as low word + offset and high word, added up inside the asm: as 64-bit sums outside,",
       "// the compiler hoists all of them out of the loop, two registers each.",
       "// m64 nN k16, bf16 x bf16 -> f32.  ss: A and B in shared memory, both K-major.  rs: A in registers, B MN-major.",
       "#pragma once", "#include <cstdint>", "template <int N> struct Wgmma;"]
for n in (64, 80, 96, 112, 128, 160, 176, 192, 256):
    r = n // 2
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    out.append(f"""template <> struct Wgmma<{n}> {{
  static __device__ __forceinline__ void ss(float (&d)[{r}], uint32_t a, uint32_t aoff, uint32_t ahi, uint32_t b, uint32_t boff, uint32_t bhi, int acc) {{
    asm volatile("{{.reg .pred p; .reg .b32 t; .reg .b64 da, db; setp.ne.b32 p, %{r + 6}, 0;\\n"
                 "add.u32 t, %{r}, %{r + 1}; mov.b64 da, {{t, %{r + 2}}}; add.u32 t, %{r + 3}, %{r + 4}; mov.b64 db, {{t, %{r + 5}}};\\n"
                 "{name} {regs(r)}, da, db, p, 1, 1, 0, 0;}}"
                 : {outs(r)} : "r"(a), "r"(aoff), "r"(ahi), "r"(b), "r"(boff), "r"(bhi), "r"(acc));
  }}
  static __device__ __forceinline__ void rs(float (&d)[{r}], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b, uint32_t boff, uint32_t bhi) {{
    asm volatile("{{.reg .b32 t; .reg .b64 db; add.u32 t, %{r + 4}, %{r + 5}; mov.b64 db, {{t, %{r + 6}}};\\n"
                 "{name} {regs(r)}, {regs(4, r)}, db, 1, 1, 1, 1;}}"
                 : {outs(r)} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(boff), "r"(bhi));
  }}
}};""")
open(sys.argv[1] if len(sys.argv) > 1 else "wgmma_ops.cuh", "w").write("\n".join(out) + "\n")
