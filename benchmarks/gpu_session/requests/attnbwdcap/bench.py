"""Gradients of capped scores: by exponentials (main) and by polynomials where a tile allows it (near); in turns."""
import statistics, sys
import torch, cute_ops_torch
from functools import partial
from cute_ops.ops.attention import config, mods
from cute_ops.ops.attention import attention as M
from cute_ops.declaration.op import Op
from cute_ops.declaration.config import Tuning
from cute_ops_torch.tools.measure import elapsed
def made(name):
    m = M.attention_bwd
    return Op("attention_bwd_" + name, inputs=m.inputs, outputs=m.outputs, dtypes={**m.dtypes, "T": M.HALVES}, attrs=m.attrs, static=m.static, derived=m.derived,
        check=m.check, reference=m.reference, kernel=f"variants_b:{name}", tuning=Tuning(partial(config.attention_bwd, mods.NONE), workspace=partial(config.workspace_bwd, mods.NONE)),
        inference_only="none", doc=m.doc)
ops = {n: cute_ops_torch.register(made(n)) for n in ("main", "near")}
CASES = [(s, c) for s in ((2, 8192, 32, 8, 128), (4, 4096, 32, 8, 64)) for c in (0.0, 50.0, 30.0)]
def given(s, c, small=False):
    b, t, h, g, d = s
    if small: b, t = 1, 512
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(b, t, n, d, device="cuda", dtype=torch.bfloat16, generator=gen) for n in (h, g, g))
    out, lse = cute_ops_torch.attention(q, k, v, causal=True, softcap=c)
    return q, k, v, out, lse, torch.randn(out.shape, device="cuda", dtype=torch.bfloat16, generator=gen)
def call(n, a, c): return ops[n](*a, causal=True, softcap=c)
if sys.argv[1] == "warm":
    i = int(sys.argv[2])
    todo = [(n, s, c) for s, c in CASES for n in (("main", "near") if c else ("main",))]
    for n, s, c in todo[i::8]: call(n, given(s, c, True), c)
    torch.cuda.synchronize(); print("compiled"); sys.exit()
base = {}
for s, c in CASES:
    names, a = (("main", "near") if c else ("main",)), given(s, c)
    found = {n: call(n, a, c)[:3] for n in names}; torch.cuda.synchronize()
    q, k, v = (x[-1, :, -1 if i == 0 else -1].double() for i, x in enumerate(a[:3]))
    text = ""
    if c:
        # dq of the last head's last rows, in float64
        do, rows = a[5][-1, -256:, -1].double(), slice(-256, None)
        raw = q[rows] @ k.T * s[4] ** -0.5; t = torch.tanh(raw / c); i = torch.arange(s[1] - 256, s[1], device="cuda")[:, None]
        sc = (c * t).masked_fill(torch.arange(s[1], device="cuda") > i, -float("inf")); p = sc.softmax(-1)
        dp = do @ v.T; delta = (p * dp).sum(-1, keepdim=True); dq = (p * (dp - delta) * (1 - t * t)) @ k * s[4] ** -0.5
        text = " ".join(f"{n}: dq off by {(f[0][-1, rows, -1].double() - dq).abs().max() / dq.abs().max():.1e}" for n, f in found.items())
    t = {n: [] for n in names}
    for _ in range(7):
        for n in names: t[n].append(elapsed(lambda n=n: [call(n, a, c) for _ in range(5)]) / 5)
    us = {n: statistics.median(x) for n, x in t.items()}
    if not c: base[s] = us["main"]
    print(s, "cap", c, "; ".join(f"{n} {u:.0f} us (+{100 * (u / base[s] - 1):.1f}%)" for n, u in us.items()), text, flush=True)
