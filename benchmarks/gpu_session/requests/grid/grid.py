"""Drawn points of the recorded grid again: ours (torch), beside the recorded figure."""
import argparse, csv, random, sys, time, statistics, math
from pathlib import Path
import device_time as d, prewarm, torch
from common import Table
from problems import by_importance, grid
from formulas import FUNCTIONS
from rich.console import Console
from torch._functorch import config as functorch_config

P = argparse.ArgumentParser(); P.add_argument("--out", type=Path); P.add_argument("--seconds", type=float); P.add_argument("--cpu", action="store_true"); P.add_argument("--seed", type=int, default=20261129)
o = P.parse_args(); begin = time.perf_counter()
prewarm.share_caches(); functorch_config.donated_buffer = False
console = Console(width=200, highlight=False)
OURS = "ours (torch)"
rec = {}
for r in csv.DictReader(open("benchmarks/results/device_time.csv")):
    if r["contender"] == OURS and r["status"] == "ok": rec[tuple(r[c] for c in d.KEY)] = r
own = [n for n in d.BY_NAME if n not in FUNCTIONS]
tasks = [(p, x) for p in by_importance(grid(own, False)) for x in p.directions if d.key(p, x) in rec]
big = [t for t in tasks if float(rec[d.key(*t)]["bytes"]) >= 128e6]
small = [t for t in tasks if float(rec[d.key(*t)]["bytes"]) < 128e6]
rng = random.Random(o.seed)
chosen = rng.sample(big, min(84, len(big))) + rng.sample(small, min(16, len(small)))
rng.shuffle(chosen)
print(len(tasks), "recorded,", len(big), "of 128 MB and more,", len(chosen), "drawn", flush=True)
if o.cpu:
    for t in chosen[:5]: print(d.key(*t))
    sys.exit()
d.compile_ahead(chosen, [OURS], 14, 45, console)
print("compiled", round(time.perf_counter() - begin), flush=True)
device = torch.device("cuda")
table = Table(o.out / "device_time.csv", d.COLUMNS, False)
ceiling = statistics.median(d.copy_rate(device, 1.0)); print("copy", round(ceiling), flush=True)
bench = d.Bench(device, table, 12, ceiling, Console(file=open(o.out / "lines.txt", "w"), width=200))
wrote = {}
w = bench.write
def write(problem, direction, status, samples, calls, sets):
    wrote[d.key(problem, direction)] = (samples.get(OURS), status)
    w(problem, direction, status, samples, calls, sets)
bench.write = write
out = []
def report(final=False):
    ok = [(k, q) for k, q in out]
    if not ok: return
    g = lambda v: math.exp(sum(map(math.log, v)) / len(v)) if v else float("nan")
    big_ = [q[0] for k, q in ok if float(rec[k]["bytes"]) >= 128e6]
    print(f"{len(ok)} points: new / recorded {g([q[0] for _, q in ok]):.4f}; {len(big_)} of 128 MB: {g(big_):.4f}; beyond 3%: {sum(abs(q[0]-1)>.03 for _, q in ok)}, slower {sum(q[0]>1.03 for _, q in ok)}, of them fastest sample within 3%: {sum(q[0]>1.03 and q[1]<=1.03 for _, q in ok)}", flush=True)
for i, (p, x) in enumerate(chosen):
    if time.perf_counter() - begin > o.seconds: print("out of time at", i); break
    try: bench.measure(p, x, [OURS])
    except Exception as e: print("failed", d.key(p, x), str(e).splitlines()[0][:120], flush=True)
    k = d.key(p, x); s, status = wrote.get(k, (None, None))
    if s:
        ratio, fast = statistics.median(s) / float(rec[k]["us"]), min(s) / float(rec[k]["us"])
        out.append((k, (ratio, fast)))
        if abs(ratio - 1) > .03: print(f"{ratio:.3f} (fastest {fast:.3f}) {statistics.median(s):.1f} us beside {float(rec[k]['us']):.1f}", *k, rec[k]["commit"], flush=True)
    elif status: print(k, status, flush=True)
    bench.release()
    if i % 20 == 19: report()
report(True)
