"""Latent attention: main's kernel, clusters that share loads, halves that are freed one by one, both; in turns."""
import dataclasses, math, statistics, sys, time
import torch, cute_ops_torch
from cute_ops.ops.attention import config
from cute_ops.ops.attention import mla_decode as M
from cute_ops.ops.attention.mla_decode import mla_decode
from cute_ops.declaration.op import Op
from cute_ops.declaration.config import Tuning
from cute_ops_torch.tools.measure import elapsed
def chosen(sharers):
    def of(problem):
        c = config.mla_decode(problem)
        return c if c.sharers == 1 or sharers else c._replace(sharers=1) if hasattr(c, '_replace') else dataclasses.replace(c, sharers=1)
    return of
def op(name, kernel, sharers):
    m = mla_decode
    return cute_ops_torch.register(Op(
        "mla_decode_" + name, inputs=m.inputs, outputs=m.outputs, dtypes=m.dtypes, attrs=m.attrs, static=("d", "h", "s"),
        derived=m.derived, check=M.check, reference=M.reference, kernel=kernel, tuning=Tuning(chosen(sharers), workspace=config.mla_workspace),
        inference_only="none", doc=m.doc))
OURS = "cute_ops.kernels.attention.mla:mla_decode"
MAKES = {"main": ("mla_main:mla_decode", 0), "cluster": ("mla_cluster:mla_decode", 1), "halves": (OURS, 0), "both": (OURS, 1)}
def make(name):
    return op(name, *MAKES[name])
def given(b, keys, heads, page, queries=1):
    g = torch.Generator("cuda").manual_seed(b + keys + heads)
    n = b * keys // page if page else b
    cache = torch.randn(n, page or keys, 576, device="cuda", dtype=torch.bfloat16, generator=g)
    table = torch.randperm(n, device="cuda", dtype=torch.int32).reshape(b, -1) if page else None
    q = torch.randn(b, queries, heads, 576, device="cuda", dtype=torch.bfloat16, generator=g)
    return q, cache, torch.full((b,), keys, device="cuda", dtype=torch.int32), table
def right(q, cache, lengths, table, i):
    n, s = int(lengths[i]), q.shape[1]
    c = (cache[table[i].long()].flatten(0, 1) if table is not None else cache[i])[:n].double()
    sc = q[i].double().transpose(0, 1) @ c.T * 192**-0.5
    seen = torch.ones(s, n, dtype=torch.bool, device="cuda").tril(n - s)
    return (sc.masked_fill(~seen, -math.inf).softmax(-1) @ c[:, :512]).transpose(0, 1)
SHAPES = ((64, 8192, 128, 64), (64, 8192, 16, 64), (64, 8192, 128, 0), (1, 65536, 128, 64), (32, 4096, 128, 64, 2))
if sys.argv[1] == "warm":
    todo = [(n, s) for n in MAKES for s in ((2, 640, 128, 64), (2, 640, 128, 0), (1, 1280, 128, 64, 2))] + [(n, (2, 640, 16, 64)) for n in ("main", "halves")]
    # the check's 64 heads x 2 queries, too
    n, s = (todo + [(n, (2, 640, 64, 64, 2)) for n in MAKES])[int(sys.argv[2])]
    make(n)(*given(*s), scale=192**-0.5)
    torch.cuda.synchronize(); print("compiled"); sys.exit()
if sys.argv[1] == "ncu":
    a = given(64, 8192, 128, 64)
    for n in ("main", "cluster", "both"): make(n)(*a, scale=192**-0.5)
    torch.cuda.synchronize(); sys.exit()
# odd lengths, holes, NaN behind the last key: against float64
if sys.argv[1] == "check":
    n = sys.argv[2]; f = make(n)
    worst = 0.0
    for s, lengths in (((3, 704, 128, 64), (704, 131, 0)), ((2, 700, 128, 0), (700, 33)), ((2, 640, 64, 64, 2), (640, 577))):
        q, cache, _, table = given(*s)
        ls = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        for i, l in enumerate(lengths):
            if table is None: cache[i, l:] = math.nan
            else:
                for j in range(table.shape[1]):
                    for slot in (range(max(l - j * s[3], 0), s[3])): cache[table[i, j].long(), slot] = math.nan
        out, lse = f(q, cache, ls, table, scale=192**-0.5)
        torch.cuda.synchronize()
        for i, l in enumerate(lengths):
            want = right(q, cache, ls, table, i) if l else torch.zeros_like(out[i]).double()
            worst = max(worst, (out[i].double() - want).abs().max().nan_to_num(99).item())
    print(f"{n}: worst error {worst:.2e}", flush=True)
    sys.exit()
ops = {}
for n in (sys.argv[2:] or MAKES):
    ops[n] = make(n)
start = time.time()
for s in SHAPES:
    a = given(*s); errs = {}
    for n, f in ops.items():
        out = f(*a, scale=192**-0.5)[0]; torch.cuda.synchronize()
        errs[n] = (out[-1].double() - right(*a, -1)).abs().max().item()
    target = torch.empty_like(a[1]); copy = lambda: target.copy_(a[1])
    t = {n: [] for n in (*ops, "copy")}
    for _ in range(7):
        for n, f in (*ops.items(), ("copy", None)):
            run = copy if f is None else (lambda f=f: f(*a, scale=192**-0.5))
            t[n].append(elapsed(lambda run=run: [run() for _ in range(8)]) / 8)
    flop = 2 * s[0] * s[1] * s[2] * (s[4] if len(s) > 4 else 1) * 1088
    print(s, "; ".join(f"{n} {statistics.median(x):.1f} (min {min(x):.1f}) us {flop / statistics.median(x) / 1e6:.0f} TF of copy {statistics.median(t['copy']) / 2 / statistics.median(x):.2f}" + (f" err {errs[n]:.1e}" if n in errs else "") for n, x in t.items()), flush=True)
    del target, a; torch.cuda.empty_cache()
    if time.time() - start > 25: break
