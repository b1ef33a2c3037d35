"""AdamW of ours beside PyTorch's fused one: host time of a step (not waited for), wall and device time."""
import csv, sys, time
from pathlib import Path
import torch
from cute_ops_torch.optim import AdamW
CPU = not torch.cuda.is_available()
device = "cpu" if CPU else "cuda"
sync = (lambda: None) if CPU else torch.cuda.synchronize
BEGIN = time.perf_counter()
bf, f4 = torch.bfloat16, torch.float32
def say(*a): print(*a, flush=True)
def llama():
    n, f, kv, v = 2048, 8192, 512, 128256
    layer = [(n, n), (kv, n), (kv, n), (n, n), (f, n), (f, n), (n, f), (n,), (n,)]
    return [(s, bf) for s in [(v, n), (n,), *layer * 16]]
generator = torch.Generator().manual_seed(37)
def drawn(count, most):
    shapes = []
    for _ in range(count):
        e = torch.rand((), generator=generator).item() * most
        n = max(int(2 ** (e / 2)), 1); m = max(int(2 ** e) // n, 1)
        shapes.append(((m, n) if n > 8 else (m * n,), bf if torch.rand((), generator=generator) < 0.7 else f4))
    return shapes
models = {
    "75 small (256x256, bias, norm)": [(s, bf) for s in [(256, 256), (256,), (256,)] * 25],
    "300 mixed (1 to 2^24, bf16, f32)": drawn(300, 14 if CPU else 24),
    "Llama 1B": [((64, 64), bf)] * 20 if CPU else llama(),
    "one of 1M": [((1024, 1024), bf)],
    "1 of 2^25": [((64, 64) if CPU else (8192, 4096), bf)],
}
def make(shapes, which, **kw):
    ps = [torch.nn.Parameter(torch.randn(s, device=device, dtype=d) * 0.02) for s, d in shapes]
    for p in ps: p.grad = torch.randn_like(p) * 1e-3
    cls = AdamW if which.startswith("ours") else torch.optim.AdamW
    return cls(ps, lr=1e-3, weight_decay=0.01, **kw)
KINDS = {"ours": {}, "torch fused": {"fused": True}, "ours capturable": {"capturable": True}, "torch fused capturable": {"fused": True, "capturable": True}}
rows = []
for name, shapes in models.items():
    opts = {}
    for which, kw in KINDS.items():
        if "capturable" in which and (CPU or "Llama" in name): continue
        b = time.perf_counter()
        opts[which] = make(shapes, which, **kw)
        for _ in range(3): opts[which].step()
        sync(); first = time.perf_counter() - b
        rows.append([name, which, first])
    n = 4 if "Llama" in name or "mixed" in name else 10
    host, wall, dev = ({w: [] for w in opts} for _ in range(3))
    for r in range(9):
        for which, o in opts.items():
            sync(); b = time.perf_counter()
            for _ in range(n): o.step()
            t = time.perf_counter() - b
            sync(); w = time.perf_counter() - b
            host[which].append(t / n * 1e6); wall[which].append(w / n * 1e6)
    if not CPU:  # device time: of kernels, from the profiler; launches of 3 steps
        from torch.profiler import ProfilerActivity, profile
        for which, o in opts.items():
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(3): o.step()
                sync()
            ks = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            dev[which] = [sum(e.device_time for e in ks) / 3, len(ks) / 3]
    say(f"{name}: {len(shapes)} parameters, {sum(torch.Size(s).numel() for s, _ in shapes) / 1e6:.1f} M [{time.perf_counter() - BEGIN:.0f} s]")
    for which in opts:
        h, w, d = sorted(host[which]), sorted(wall[which]), dev[which] or [0, 0]
        say(f"   {which:24} host {h[0]:9.1f} / {h[4]:9.1f}  wall {w[0]:9.1f} / {w[4]:9.1f}  device {d[0]:9.1f} us in {d[1]:.0f} kernels")
        rows.append([name, which, h[0], h[4], w[0], w[4], *d])
    del opts
    if not CPU: torch.cuda.empty_cache()
# Within torch.compile: a step function that holds it.
for which in ("ours", "torch fused"):
    o = make(models["75 small (256x256, bias, norm)"], which, **KINDS[which])
    def step(x):
        y = x.sin() * 2
        o.step()
        return y + 1
    compiled = torch.compile(step)
    x = torch.ones(64, device=device)
    import torch._dynamo
    b = time.perf_counter()
    for _ in range(12): compiled(x)
    sync(); first = time.perf_counter() - b
    t = []
    for _ in range(9):
        b = time.perf_counter()
        for _ in range(10): compiled(x)
        t.append((time.perf_counter() - b) * 1e5); sync()
    say(f"in torch.compile, 75 small: {which:12} first 12 calls {first:.1f} s, then host {min(t):.1f} / {sorted(t)[4]:.1f}; graphs", torch._dynamo.utils.counters["stats"])
    torch._dynamo.reset(); torch._dynamo.utils.counters.clear()
with open(Path(sys.argv[1]) / "optim.csv", "w") as f: csv.writer(f).writerows(rows)
