"""Attention to caches by other numbers of warps, stages and keys of a tile; in turns."""
import dataclasses, statistics, sys, time
import torch, cute_ops_torch
from cute_ops.ops.attention import config
from cute_ops.ops.attention import decode_attention as M
from cute_ops_torch.tools.measure import elapsed
base = config.decode_attention
def replaced(c, **new):
    return type(c)(**{**{k: getattr(c, k) for k in ("form", "tiles_m", "warps", "stages", "keys", "itemsize", "split_keys", "score")}, **new})
def made(name, new):
    new = dict(new); hint = new.pop("hint", "none")
    config.decode_attention = (lambda own, problem: replaced(base(own, problem), **new)) if new else base
    try: o = M.declare("decode_" + name)
    finally: config.decode_attention = base
    o.kernel = "hints:" + hint
    return o
def op(name, new): return cute_ops_torch.register(made(name, new))
def key(w, s, k): return dict(warps=w, stages=s, keys=k)
L1, L2 = {"hint": "l128"}, {"hint": "l256"}
D64 = {"base": {}, "l128": L1, "l256": L2, "w6s3k32": key(6, 3, 32), "w6s3k32l128": {**key(6, 3, 32), **L1}, "w6s3k32l256": {**key(6, 3, 32), **L2}, "w12s3k32": key(12, 3, 32)}
D128 = {"base": {}, "l128": L1, "l256": L2, "w8s3k16": key(8, 3, 16), "w8s3k16l256": {**key(8, 3, 16), **L2}, "w6s4k16l256": {**key(6, 4, 16), **L2}}
B128 = {"base": {}, "l128": L1, "l256": L2}
F8, BF = torch.float8_e4m3fn, torch.bfloat16
GROUPS = [((64, 8192, 64, 8, 64), BF, B128), ((64, 8192, 64, 8, 64), F8, D64), ((1, 131072, 32, 8, 128), F8, D128), ((64, 8192, 32, 8, 128), F8, D128), ((256, 1024, 32, 8, 128), F8, D128), ((1, 131072, 32, 8, 128), BF, B128), ((64, 8192, 32, 8, 128), BF, B128)]
def given(s, dtype):
    b, n, h, g, d = s
    gen = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(b, n, g, d, device="cuda", dtype=torch.bfloat16, generator=gen).to(dtype) for _ in range(2))
    q = torch.randn(b, 1, h, d, device="cuda", dtype=torch.bfloat16, generator=gen)
    scale = torch.ones(g, device="cuda") if dtype == F8 else None
    return q, k, v, torch.full((b,), n, device="cuda", dtype=torch.int32), None, None, scale, scale
todo = [(s, t, n, new) for s, t, table in (GROUPS[0], GROUPS[1], GROUPS[2], GROUPS[5]) for n, new in table.items()]
if sys.argv[1] == "warm":
    for s, t, n, new in todo[int(sys.argv[2])::int(sys.argv[3])]:
        try: op(n, new)(*given((s[0], min(s[1], 2048), *s[2:]), t)); print("ok")
        except Exception as e: print("failed", n, str(e)[:100])
    torch.cuda.synchronize(); sys.exit()
start, ops = time.time(), {}
for s, t, table in GROUPS:
    a = given(s, t); want, runs, errs = None, {}, {}
    for n, new in table.items():
        if n not in ops: ops[n] = op(n, new)
        try:
            out = ops[n](*a)[0]; torch.cuda.synchronize()
            want = out if want is None else want
            errs[n] = (out.float() - want.float()).abs().max().item(); runs[n] = lambda f=ops[n]: f(*a)
        except Exception as e: print("failed", n, str(e)[:150])
    target = torch.empty_like(a[1]); runs["copy"] = lambda: target.copy_(a[1])
    times = {n: [] for n in runs}
    for _ in range(7):
        for n, r in runs.items(): times[n].append(elapsed(lambda r=r: [r() for _ in range(8)]) / 8)
    c = statistics.median(times["copy"])
    print(s, str(t)[6:], "; ".join(f"{n} {statistics.median(x):.1f} us {c / statistics.median(x):.3f} of copy" + (f" diff {errs[n]:.0e}" if n in errs else "") for n, x in times.items()), flush=True)
    del a, target; torch.cuda.empty_cache()
    if time.time() - start > 32: break
