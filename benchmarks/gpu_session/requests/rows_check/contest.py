"""Contests: our config beside others, interleaved; share of a copy. python contest.py POINTS OUT SECONDS"""
import csv, itertools, json, os, random, statistics, sys, time
from concurrent.futures import wait
from pathlib import Path

sys.path.insert(0, "benchmarks")
BEGIN = time.perf_counter()
LIMIT = float(sys.argv[3])
DRY = os.environ.get("DRY")
import torch
from problems import Problem, grouped
from cute_ops.autotune.space import objection
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit import cache, target
from cute_ops.jit.plan import configured, signature
from cute_ops.ops import rows as R
from cute_ops.autotune.rows import bytes_moved

T = target.parse("sm_90a:132") if DRY else target.of_device(0)
HIDE = {"expression", "reads", "writes", "kinds", "shared", "turns", "stretched", "random", "form"}


def rows(op, n, d="fwd", mb=224, **k):
    one, two = (Problem(op, rows=r, n=n, **k).bytes(d) for r in (1, 2))
    return Problem(op, rows=max((mb << 20) // (two - one), 1), n=n, **k)


def touched(s):
    from cute_ops.ops.rows import row_of
    names = [x for x in s.problem.dtypes]
    rows_ = [n for n in names if n in R.TENSORS or n in ("x", "y", "gate", "up", "p", "q", "target", "out", "dx")]
    row = R.row_of(s.problem, rows_)
    return row


def spill_free(configs):
    return configs


def plans_of(binding, overrides):
    """(label, plan) of the heuristic and of others that may run."""
    call = signature(binding, {}, T)
    op = binding.op
    h = dict(op.config(call.problem))
    found, seen = [("=", configured(call, h))], {tuple(sorted(h.items()))}
    for over in overrides(call, h) if callable(overrides) else overrides:
        c = {**h, **over}
        key = tuple(sorted(c.items()))
        if key in seen:
            continue
        seen.add(key)
        try:
            if op.space and objection(op.space, call.problem, c, op.name) and not DRY:
                pass  # compiled all the same: estimates may be too high
            found.append((" ".join(f"{k}={v}" for k, v in c.items() if h.get(k) != v), configured(call, c)))
        except Exception as e:
            print("no plan", op.name, over, repr(e)[:100])
    return h, found


def main(points):
    todo = []
    for name, binding, overrides in points:
        try:
            h, found = plans_of(binding, overrides)
            todo.append((name, binding, h, found))
        except Exception as e:
            print("ERR", name, repr(e)[:200], flush=True)
    print(f"{time.perf_counter()-BEGIN:.0f} s: {len(todo)} points, {sum(len(f) for *_, f in todo)} kernels", flush=True)
    if DRY:
        for name, binding, h, found in todo:
            print(name, {k: v for k, v in h.items() if k not in HIDE})
            for label, _ in found[1:]:
                print("      ", label)
        return
    from cute_ops_torch.tools import measure
    copy = measure.copy_rate()
    print(f"copy {copy:.0f} GB/s", flush=True)
    out = open(sys.argv[2], "w", newline="")
    table = csv.writer(out)
    table.writerow(("point", "bytes", "copy", "config", "us", "share", "heuristic"))
    with cache.building(p.variant for *_, f in todo for _, p in f) as built:
        for name, binding, h, found in todo:
            if time.perf_counter() - BEGIN > LIMIT:
                print("time is over at", name, flush=True)
                break
            good = []
            for label, p in found:
                b = built[p.variant.symbol].result()
                if b.error:
                    print("  does not compile:", name, label, str(b.error)[:80])
                else:
                    good.append((label, p))
            try:
                moved = bytes_moved(binding)
                with measure.contest(binding, {}, [p for _, p in good]) as taken:
                    times = {i: [] for i in range(len(good))}
                    wrong = {}
                    for i in range(1, len(good)):
                        why = taken.differs(i, {})
                        if why:
                            wrong[i] = why
                    for turn in range(5):
                        for i in times:
                            try:
                                times[i].append(taken.sample(i))
                            except Exception as e:
                                times[i].append(float("inf")); wrong[i] = repr(e)[:60]
                us = [statistics.median(t) for t in times.values()]
                share = [moved / u / 1e3 / copy for u in us]
                order = sorted(range(len(us)), key=lambda i: us[i])
                print(f"{name}: {share[0]:.3f} {({k: v for k, v in h.items() if k not in HIDE})}", flush=True)
                for i in order[:4]:
                    if i: print(f"      {share[i]:.3f} {good[i][0]}" + (f"  WRONG {wrong[i]}" if i in wrong else ""), flush=True)
                for i in order:
                    table.writerow((name, moved, f"{copy:.0f}", good[i][0], f"{us[i]:.2f}", f"{share[i]:.4f}", " ".join(f"{k}={v}" for k, v in h.items() if k not in HIDE) + (" WRONG" if i in wrong else "")))
                out.flush()
            except Exception as e:
                print("ERR", name, repr(e)[:300], flush=True)
                if "CUDA" in repr(e): raise
    print(f"{time.perf_counter()-BEGIN:.0f} s", flush=True)
    os._exit(0)
