"""Where a step of a composite with its gradient spends host time. Tables to stdout, details to files."""
import gc, json, linecache, os, sys, threading, time
from collections import defaultdict
from pathlib import Path

import torch

OUT = Path(sys.argv[1]); OUT.mkdir(parents=True, exist_ok=True)
CPU = "--cpu" in sys.argv
BEGIN = time.perf_counter()
if CPU:
    sys.path.insert(0, "/tmp/host")
    import stub  # noqa: F401
device = torch.device("cpu" if CPU else "cuda")
sync = (lambda: None) if CPU else torch.cuda.synchronize
import host_time

def say(*a): print(*a, flush=True)

def left(): return 80 - (time.perf_counter() - BEGIN)

NAMES = ["mlp", "rmsnorm_linear", "linear_cross_entropy", "gated_mlp", "linear_add_rmsnorm", "qkv_rope"]
made = host_time.composites(device, True)
if "--warm" in sys.argv:  # a process of its own for each composite: kernels compile beside each other
    name = sys.argv[sys.argv.index("--warm") + 1]
    for grad in (False, True):
        for kind in ("", ", its parts"):
            run = host_time.composites(device, grad)[f"cute_ops_torch.{name}{kind}"]()
            run(); run()
    sync()
    sys.exit(0)
import subprocess
if not CPU:
    others = [subprocess.Popen([sys.executable, __file__, sys.argv[1], "--warm", n]) for n in NAMES]
    say("warm", [p.wait() for p in others], f"{time.perf_counter() - BEGIN:.1f} s")
steps = {}
for name in NAMES:
    for kind in ("", ", its parts", ", by torch"):
        b = time.perf_counter()
        try:
            run = made[f"cute_ops_torch.{name}{kind}"]()
            for _ in range(4): run()
            sync()
        except Exception as e:
            say("FAILED", name, kind, repr(e)[:200]); continue
        outputs = run.__closure__[run.__code__.co_freevars.index("outputs")].cell_contents
        forward = outputs.__closure__[outputs.__code__.co_freevars.index("forward")].cell_contents
        steps[name, kind] = run, forward
        say(f"first calls {name}{kind}: {time.perf_counter() - b:.2f} s")

def outs_of(forward):
    out = forward()
    return [out] if isinstance(out, torch.Tensor) else list(out)

def leaves(outs):
    found, todo, seen = [], [o.grad_fn for o in outs], set()
    while todo:
        n = todo.pop()
        if n is None or n in seen: continue
        seen.add(n)
        if hasattr(n, "variable"): found.append(n.variable)
        todo += [f for f, _ in n.next_functions]
    return found

def sample(call, n):
    b = time.perf_counter()
    for _ in range(n): call()
    t = (time.perf_counter() - b) / n * 1e6
    b = time.perf_counter(); sync()
    return t, (time.perf_counter() - b) / n * 1e6  # the wait that is left: > 0 where the device is behind

def variants(run, forward):
    outs = outs_of(forward); ones = [torch.ones_like(o) for o in outs]; ls = leaves(outs)
    def grad(): torch.autograd.grad(outs_of(forward), ls, ones)
    def fresh():
        for l in ls: l.grad = None
        torch.autograd.backward(outs_of(forward), ones)
    def old():
        outs = outs_of(forward)
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    return {"as before": old, "fresh, one thread": run, "autograd.grad": grad, "fresh .grad": fresh, "forward": forward}

small = torch.randn(4, device=device, requires_grad=True); one = torch.ones(4, device=device)
def add_one_thread():
    with torch.autograd.set_multithreading_enabled(False): torch.autograd.grad(small + 1, small, one)
ADD = {"fresh, one thread": add_one_thread, "autograd.grad": lambda: torch.autograd.grad(small + 1, small, one), "forward": lambda: small + 1}
table = {}
calls = {("add", ""): ADD} | {k: variants(*v) for k, v in steps.items() if k[1] != ", its parts"}
for r in range(7):
    if left() < 45: break
    for key, each in calls.items():
        for v, call in each.items():
            for n in (20, 200):
                if n == 200 and (v not in ("as before", "fresh, one thread") or r > 3): continue
                table.setdefault((key, v, n), []).append(sample(call, n))
say("\nhost us per call: best / median, and the wait after it (best); n calls a sample")
for (key, v, n), t in table.items():
    us = sorted(a for a, _ in t); w = min(b for _, b in t)
    say(f"{key[0] + key[1]:32} {v:18} n={n:3} {us[0]:8.1f} {us[len(us)//2]:8.1f}  wait {w:7.1f}")

# The same calls from three threads: main, another of Python, autograd's of the device.
import cute_ops_torch as ours
with torch.no_grad():
    x16, w16, big, bias16 = (torch.randn(*s, device=device, dtype=torch.bfloat16) for s in ((16, 512), (512, 512), (1024, 512), (512,)))
norm16 = torch.ones(512, device=device, dtype=torch.bfloat16)
loose = {
    "ours.rmsnorm": lambda: ours.rmsnorm(x16, norm16), "ours.linear_gelu": lambda: ours.linear_gelu(x16, w16, bias16),
    "torch.mm": lambda: torch.mm(x16, w16), "torch.add": lambda: torch.add(x16, x16), "sum(0)": lambda: x16.sum(0),
    "empty": lambda: torch.empty_like(x16),
}
found = {}
def probe(where):
    with torch.no_grad():
        for name, call in loose.items():
            for _ in range(3): call()
            t = []
            for _ in range(15):
                b = time.perf_counter()
                for _ in range(20): call()
                t.append((time.perf_counter() - b) / 20 * 1e6)
            sync()
            found[where, name] = min(t), sorted(t)[7]
class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x + 1
    @staticmethod
    def backward(ctx, d):
        probe("autograd's"); return d
probe("main")
t = threading.Thread(target=probe, args=("python's",)); t.start(); t.join()
Probe.apply(small).sum().backward()
say("\nus of a call from a thread (best, median)", os.getloadavg(), os.cpu_count(), "switch", sys.getswitchinterval())
for (where, name), (b, m) in found.items(): say(f"  {where:12} {name:18} {b:7.2f} {m:7.2f}")

# Device time of a step: many replays' worth of launches, finished; and by events.
say(f"\n[{left():.0f} s left] steady state: specialised again? collections, segments")
from cute_ops_torch.host import fast_path, guards, repeated as rep
hits = defaultdict(int)
def counted(owner, name, label):
    f = getattr(owner, name)
    def g(*a, **k):
        hits[label] += 1
        return f(*a, **k)
    setattr(owner, name, g)
counted(fast_path.FastPath, "_run_first", "FastPath._run_first"); counted(guards.GuardedCalls, "put", "GuardedCalls.put")
gc.callbacks.append(lambda phase, info: hits.__setitem__("gc", hits["gc"] + (phase == "start")))
for key, (run, forward) in steps.items():
    hits.clear()
    before = {} if CPU else torch.cuda.memory_stats()
    for _ in range(50): run()
    sync()
    after = {} if CPU else torch.cuda.memory_stats()
    more = {k: after[k] - before.get(k, 0) for k in ("segment.all.allocated", "num_device_alloc", "num_sync_all_streams", "allocation.all.allocated") if k in after}
    say(f"{key[0] + key[1]:38} {dict(hits)} per 50; {more}")

# CUDA API calls and kernels per step: the profiler's state is the main thread's, the steps run in another, so that no
# function of ours sees a profiler.
say(f"\n[{left():.0f} s left] CUDA API calls and kernels of a step (profiled from another thread; API us are with CUPTI)")
if not CPU:
    from torch.profiler import ProfilerActivity, profile
    for key, (run, forward) in steps.items():
        if left() < 18: break
        for what, call in (("step", run), ("forward", forward)):
            def work():
                for _ in range(20): call()
                torch.cuda.synchronize()
            t = threading.Thread(target=work)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
                t.start(); t.join()
            path = OUT / "trace.json"
            p.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]; path.unlink()
            api, kernels = defaultdict(lambda: [0, 0.0]), defaultdict(lambda: [0, 0.0])
            for e in events:
                if e.get("cat") in ("cuda_runtime", "cuda_driver"):
                    api[e["name"]][0] += 1; api[e["name"]][1] += e["dur"]
                elif e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
                    kernels[e["name"][:90]][0] += 1; kernels[e["name"][:90]][1] += e["dur"]
            n, us = (sum(v[i] for v in kernels.values()) / 20 for i in (0, 1))
            say(f"{key[0] + key[1]:38} {what:8} kernels {n:5.1f} device us {us:6.1f} | " + ", ".join(
                f"{name} {c / 20:.1f}x{t / c:.1f}" for name, (c, t) in sorted(api.items(), key=lambda i: -i[1][1]) if c >= 10))
            with (OUT / "kernels.txt").open("a") as f:
                print(key, what, file=f)
                for name, (c, t) in sorted(kernels.items(), key=lambda i: -i[1][1]): print(f"   {c / 20:5.1f} x {t / c:6.2f} us  {name}", file=f)

# Within the backward: time of each node's backward, and of each call that its steps repeat.
say(f"\n[{left():.0f} s left] within a step (us): nodes, and what the recorded programs call, timed one by one")
from cute_ops_torch.host import recorded
from cute_ops_torch.library import nodes
spent = defaultdict(lambda: [0, 0.0])
def timed(f, label):
    def g(*a, **k):
        b = time.perf_counter()
        try: return f(*a, **k)
        finally:
            s = spent[label]; s[0] += 1; s[1] += time.perf_counter() - b
    return g
with_gradient = nodes._with_gradient
def timing(op, *a, **k):
    f, b = with_gradient(op, *a, **k)
    return timed(f, f"node {op.name} forward"), timed(b, f"node {op.name} backward")
nodes._with_gradient = timing
constant = recorded.Record._constant
def timed_constant(self, value):
    name = constant(self, value)
    if callable(value) and not isinstance(value, (torch.dtype, type)):
        self.values[name] = timed(value, f"   {getattr(value, '__qualname__', value)} {getattr(getattr(value, '__code__', None), 'co_filename', '')[-60:]}")
    return name
recorded.Record._constant = timed_constant
from cute_ops_torch import registry
for r in list(registry._registered.values()):  # nodes and guards made anew, timed
    r.nodes._known.clear()
    fp = r.fast_path
    if hasattr(fp, "_calls"):
        for d in (fp._calls.table, fp._calls._links, fp._calls._chains, fp._calls._branches): d.clear()
    if "launcher" in r.__dict__: r.launcher.calls.clear()
for (name, kind), (run, forward) in steps.items():
    if kind == ", by torch" or left() < 4: continue
    n = 20
    for _ in range(5): run()
    sync(); spent.clear(); t = []
    for _ in range(5):
        b = time.perf_counter()
        for _ in range(n): run()
        t.append((time.perf_counter() - b) / n * 1e6)
        sync()
    t = min(t)
    say(f"{name}{kind}: {t:.1f}")
    for label, (c, s) in sorted(spent.items(), key=lambda i: -i[1][1]):
        say(f"     {c / 100:4.1f} x {s / c * 1e6:7.2f}  {label}")
with (OUT / "sources.txt").open("w") as f:
    for name, (_, _, lines, _) in ((k, v) for k, v in linecache.cache.items() if len(v) == 4):
        if "program" in name or "steps" in name or "_backward" in name:
            print("#", name, file=f); print("".join(lines), file=f)
