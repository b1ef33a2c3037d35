import sys, torch, time
import torch.nn.functional as F
import cute_ops_torch.inductor as inductor
dev = "cuda" if torch.cuda.is_available() else "cpu"
B, S, N = (64, 256, 1152) if dev == "cuda" else (2, 3, 16)
def region(x, y, gate, shift, scale, bias):
    x = x + gate * (y + bias)
    return x, F.layer_norm(x, (N,), None, None, 1e-6) * (1 + scale) + shift
def leaf(*s): return torch.randn(s, device=dev, dtype=torch.bfloat16).requires_grad_()
ins = [leaf(B, S, N), leaf(B, S, N), leaf(B, 1, N), leaf(B, 1, N), leaf(B, 1, N), leaf(N)]
douts = [torch.randn(B, S, N, device=dev, dtype=torch.bfloat16) for _ in range(2)]
def plain(*a): return region(*a)
def ours(*a): return region(*a)
runs = {"torch.compile": torch.compile(plain)}
def call(run): return torch.autograd.grad(run(*ins), ins, douts)
t = time.time(); want = call(runs["torch.compile"]); print("compiled", time.time() - t, flush=True)
with inductor.enable(devices=(dev,)):
    t = time.time(); runs["pass"] = torch.compile(ours); got = call(runs["pass"]); print("pass compiled", time.time() - t, dict(inductor.replaced), flush=True)
ref = call(lambda *a: region(*[v.double() for v in a])) if dev == "cpu" else None
print("largest differences", [round((a.float() - b.float()).abs().max().item() / b.float().abs().max().item(), 4) for a, b in zip(got, want)], flush=True)
if dev == "cuda":
    best = {k: 1e9 for k in runs}
    graphs = {}
    for k, run in runs.items():
        for _ in range(3): call(run)
    for _ in range(6):
        for k, run in runs.items():
            torch.cuda.synchronize()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(20_000_000); a.record()
            for _ in range(20): call(run)
            b.record(); torch.cuda.synchronize()
            best[k] = min(best[k], a.elapsed_time(b) / 20 * 1e3)
    print({k: f"{v:.1f} us forward + backward" for k, v in best.items()}, flush=True)
