"""Forward: largest scores by floats (main) and by words (max3); soft caps' ways; in turns."""
import statistics, sys
import torch, cute_ops_torch
from functools import partial
from cute_ops.ops.attention import config, mods
from cute_ops.ops.attention import attention as M
from cute_ops.declaration.op import Op
from cute_ops.declaration.config import Tuning
from cute_ops_torch.tools.measure import elapsed
def op(name):
    m = M.attention
    return cute_ops_torch.register(Op("attention_" + name, inputs=m.inputs, outputs=m.outputs, dtypes={**m.dtypes, "T": M.HALVES}, attrs=m.attrs, static=m.static, derived=m.derived,
        check=m.check, reference=m.reference, kernel=f"variants:{name}", tuning=Tuning(partial(config.attention, mods.NONE), workspace=partial(config.workspace, mods.NONE)),
        inference_only="none", doc=m.doc))
NAMES = ("main", "max3", "signed3", "wide")
ops = {n: op(n) for n in NAMES}
SHAPES = ((2, 8192, 32, 8, 128), (4, 4096, 32, 8, 64), (2, 4096, 16, 16, 256))
CASES = [(s, o, n) for s in SHAPES[:2] for o in ({"causal": True}, {}) for n in ("main", "max3")] + [(SHAPES[2], {"causal": True}, n) for n in ("main", "max3")]
CASES += [(s, {"causal": True, "softcap": c}, n) for s in SHAPES[:2] for c in (50.0, 30.0) for n in (("main", "signed3", "wide") if c == 30 else ("main", "signed3"))]
def given(s, small=False):
    b, t, h, g, d = s
    if small: b, t = 1, 512
    gen = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(b, t, n, d, device="cuda", dtype=torch.bfloat16, generator=gen) for n in (h, g, g)]
if sys.argv[1] == "warm":
    for s, o, n in CASES[int(sys.argv[2])::20]:
        ops[n](*given(s, True), **o)
    torch.cuda.synchronize(); print("compiled"); sys.exit()
if sys.argv[1] == "ncu":
    a = given(SHAPES[0])
    for _ in range(2):
        for o in ({"causal": True}, {"causal": True, "softcap": 50.0}): ops["main"](*a, **o)
    torch.cuda.synchronize(); sys.exit()
def right(a, o):
    q, k, v = (x[-1, :, -1].double() for x in a)
    sc = q[-128:] @ k.T * q.shape[-1] ** -0.5
    if "softcap" in o: sc = o["softcap"] * torch.tanh(sc / o["softcap"])
    if "causal" in o:
        i = torch.arange(len(q) - 128, len(q), device="cuda")[:, None]
        sc = sc.masked_fill(torch.arange(len(q), device="cuda") > i, -float("inf"))
    return sc.softmax(-1) @ v, sc.logsumexp(-1)
# rows whose scores are all negative, equal, infinite
for d in (64, 128):
    a = given((1, 512, 32, 8, d)); a[0], a[1] = a[0].abs(), -a[1].abs()
    for n in ("main", "max3"):
        out, lse = ops[n](*a, causal=True); r, l = right(a, {"causal": True})
        print(f"negative d{d} {n}: {(out[-1, -128:, -1].double() - r).abs().max():.1e} lse {(lse[-1, -1, -128:].double() - l).abs().max():.1e}", flush=True)
groups = {}
for s, o, n in CASES: groups.setdefault((s, tuple(o.items())), []).append(n)
for (s, o), names in groups.items():
    o, a = dict(o), given(s)
    r, l = right(a, o); errs = {}
    for n in names:
        out, lse = ops[n](*a, **o)
        errs[n] = (out[-1, -128:, -1].double() - r).abs().max().item(), (lse[-1, -1, -128:].double() - l).abs().max().item()
    t = {n: [] for n in names}
    for _ in range(7):
        for n in names: t[n].append(elapsed(lambda n=n: [ops[n](*a, **o) for _ in range(6)]) / 6)
    print(s, o, "; ".join(f"{n} {statistics.median(x):.0f} (min {min(x):.0f}) err {errs[n][0]:.1e} lse {errs[n][1]:.1e}" for n, x in t.items()), flush=True)
