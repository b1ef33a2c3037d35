"""Near configs of drawn products beside torch's mm and addmm: times for the model of cycles."""
import argparse, csv, json, math, os, random, statistics, sys, threading, time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, "benchmarks")
import torch
import torch.nn.functional as F
from sample import draw_size

from cute_ops.jit import cache, target
from cute_ops.jit.plan import configured, signature
from cute_ops.ops.gemm.config import PLAIN, GemmSize, configs, cycles, sm_cycles, with_edge
from cute_ops.ops.gemm.linear import linear, linear_dweight, linear_dx
from cute_ops_torch.host.launch import planned_call
from cute_ops_torch.host.sampler import graph_sampler
from cute_ops_torch.library.tensors import bind_tensors, memory

SIZES = {"linear": ("m", "n", "k"), "linear_dx": ("m", "k", "n"), "linear_dweight": ("n", "k", "m")}


def draw(seed, few, more, dw):
    rng, found = random.Random(f"{seed} configs"), []
    for count, low, high, op in ((few, 0, 9, "linear"), (more, 9, 14, "linear"), (dw, 6, 12.5, "linear_dweight"), (dw, 6, 13, "linear_dx")):
        left = count
        while left:
            m = round(2 ** rng.uniform(low, high))
            m = rng.choice((m, -(-m // 64) * 64))
            n, k = (draw_size(rng) // 8 * 8 for _ in range(2))
            if op == "linear_dweight":
                m = -(-m // 8) * 8
            if 2**26 <= m * n * k <= 2**36.5 and n * k <= 2**28:
                found.append((op, m, n, k))
                left -= 1
    return found


KNOWN = [("linear", *size) for size in (
    (64, 28672, 6400), (192, 1984, 6144), (64, 3584, 6144), (64, 6144, 3584), (768, 584, 4248), (768, 4248, 584),
    (24, 11008, 1024), (24, 1024, 11008), (16256, 2800, 2304), (256, 7168, 4096), (51, 14584, 7168), (3072, 272, 512),
)] + [("linear_dx", *size) for size in ((139, 8192, 10240), (192, 28672, 14336), (320, 6400, 4096))]


def near(op, m, n, k, sm_count, limit):
    """Those that the model has near its best, and of every family of tiles the best one."""
    dims = dict(m=m, n=n, k=k)
    rows, columns, terms = (dims[d] for d in SIZES[op])
    size = GemmSize(rows, columns, terms)
    possible = [with_edge(c, rows) if op != "linear_dweight" else c for c in configs("sm_90a", sm_count, COST[op])]
    times = sorted(((cycles(c, size, COST[op]), i) for i, c in enumerate(possible)))
    least = times[0][0]
    kept = [i for rank, (t, i) in enumerate(times) if t <= 1.3 * least or rank < 8][:limit]
    found = [possible[i] for i in kept]
    if op == "linear" and m <= 512:  # longer steps: fewer waits
        twins = [c for c in found if c.tile_m == 64 and c.stages >= 6][:2]
        found += [replace(c, tile_k=128, stages=c.stages // 2) for c in twins]
    return found, size


from cute_ops.ops.gemm.config import EpilogueCost
COST = {"linear": PLAIN, "linear_dx": EpilogueCost(blocks=64), "linear_dweight": EpilogueCost(blocks=64)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path)
    p.add_argument("--seconds", type=float, default=70)
    p.add_argument("--seed", type=int, default=88123)
    p.add_argument("--list", action="store_true")
    given = p.parse_args()
    begin = time.time()
    points = KNOWN + draw(given.seed, 6, 5, 6)
    sm_count = 132
    todo = []
    for op, m, n, k in points:
        found, size = near(op, m, n, k, sm_count, 10)
        todo.append((op, m, n, k, found, size))
    kernels = {(op, json.dumps(c.fields if hasattr(c, "fields") else str(c), default=str)) for op, *_, found, _ in todo for c in found}
    print(len(points), "points", sum(len(t[4]) for t in todo), "plans", len(kernels), "kernels")
    if given.list:
        for t in todo:
            print(*t[:4], len(t[4]))
        return
    ops = {o.name: o for o in (linear, linear_dx, linear_dweight)}
    where, device = target.of_device(0), torch.device("cuda")
    prepared, variants = [], []
    for name, m, n, k, found, size in todo:
        op = ops[name]
        first = inputs(op, m, n, k)
        binding = bind_tensors(op, first, [*{**op.attrs, "fused": "always"}.values()])
        call = signature(binding, memory(op, first), where)
        base = op.config(call.problem)
        plans = []
        for c in found:
            fields = flat(c)
            plans.append((c, configured(call, fields)))
        chosen = configured(call, base)
        if all(pl.variant != chosen.variant for _, pl in plans):
            from cute_ops.kernels.gemm.config import GemmConfig
            plans.append((GemmConfig.of(base), chosen))
        prepared.append((name, m, n, k, size, binding, plans, chosen.variant))
        variants += [pl.variant for _, pl in plans]
        del first
    order = list(range(len(KNOWN), len(prepared)))
    random.Random(1).shuffle(order)
    order = [*range(len(KNOWN)), *order]
    # In turns of both, so that a run that is cut short has some of each.
    order = [i for pair in zip(order[: len(order) // 2], order[len(order) // 2 :]) for i in pair] + ([order[-1]] if len(order) % 2 else [])
    chunks, broken, ready = [order[i : i + 6] for i in range(0, len(order), 6)], set(), []

    def build():
        for chunk in chunks:
            wanted = [pl.variant for i in chunk for _, pl in prepared[i][6]]
            for b in cache.build_all(wanted):
                if b.error is not None:
                    broken.add(b.variant)
                    print("does not compile:", str(b.error)[:300])
            ready.append(chunk)
            print(f"{len(ready)} of {len(chunks)} chunks built, {time.time() - begin:.0f} s", flush=True)

    thread = threading.Thread(target=build, daemon=True)
    thread.start()
    file = (given.out / "configs.csv").open("w", newline="")
    out = csv.writer(file)
    out.writerow("op m n k contender form tile_m tile_n cluster_m cluster_n cluster_k stages edge_m chosen model us store tile_k".split())
    stream = torch.cuda.Stream()
    done = 0
    while done < len(chunks) and time.time() - begin < given.seconds:
        if len(ready) <= done:
            time.sleep(0.05)
            continue
        for index in ready[done]:
            if time.time() - begin > given.seconds:
                print("out of time")
                break
            p = prepared[index]
            p = (*p[:6], [(c, pl) for c, pl in p[6] if pl.variant not in broken], p[7])
            try:
                measure(*p, ops, device, stream, out)
            except Exception as e:
                print("failed", p[:4], type(e).__name__, str(e)[:200])
            file.flush()
            torch.cuda.empty_cache()
        done += 1
    print(f"{time.time() - begin:.0f} s", flush=True)
    report(given.out / "configs.csv")


def flat(c):
    return c.flat()


def inputs(op, m, n, k):
    dims = {"m": (m,), "n": n, "k": k}
    return [torch.randn(t.of(dims), device="cuda").bfloat16() for t in op.inputs.values()]


def measure(name, m, n, k, size, binding, plans, chosen, ops, device, stream, out):
    op = ops[name]
    first = inputs(op, m, n, k)
    (made,) = binding.outputs.values()
    moved = sum(t.nbytes for t in first) + 2 * math.prod(made.shape)
    count = max(2, min(48, -(-150_000_000 // moved)))
    sets = [first, *(inputs(op, m, n, k) for _ in range(count - 1))]
    outs = [torch.empty(made.shape, device="cuda", dtype=torch.bfloat16) for _ in sets]
    bias = torch.randn(made.shape[-1], device="cuda").bfloat16()
    calls = {}
    if name == "linear":
        calls["mm"] = [partial(torch.mm, x, w.t(), out=o) for (x, w), o in zip(sets, outs)]
        calls["addmm"] = [partial(torch.addmm, bias, x, w.t(), out=o) for (x, w), o in zip(sets, outs)]
    else:
        calls["mm"] = [partial(torch.mm, d.t() if name == "linear_dweight" else d, x, out=o) for (d, x), o in zip(sets, outs)]
    exact = torch.empty_like(outs[0])
    calls["mm"][0].func(*calls["mm"][0].args, out=exact)
    for c, plan in plans:
        fill = planned_call(binding, plan, device).fill(tuple(op.outputs))
        outs[0].fill_(math.nan)
        fill(*first, outs[0])
        torch.cuda.synchronize()
        error = (outs[0].float() - exact.float()).abs().max().item() / exact.float().abs().max().item()
        if not error < 2**-6:
            print("WRONG", name, m, n, k, flat(c), error)
            continue
        calls[c, plan.variant] = [partial(fill, *given, o) for given, o in zip(sets, outs)]
    stream.wait_stream(torch.cuda.current_stream())
    samplers = {}
    for key, each in calls.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for call in each:
                call()
            end.record()
        end.synchronize()
        once = start.elapsed_time(end) * 1e3 / len(each)
        samplers[key] = graph_sampler(each, len(each) * max(1, math.ceil(600.0 / once / len(each))), stream)
    times = {key: [] for key in samplers}
    keys = list(samplers)
    for _ in range(5):
        for key in keys:
            times[key].append(samplers[key]())
        keys.reverse()
    for key, each in times.items():
        us = statistics.median(each)
        if isinstance(key, str):
            out.writerow([name, m, n, k, key, *[""] * 8, "", "", f"{us:.2f}", "", ""])
        else:
            c, variant = key
            out.writerow([name, m, n, k, "ours", c.form, c.tile_m, c.tile_n, c.cluster_m, c.cluster_n, c.cluster_k, c.stages, c.edge_m, int(variant == chosen), cycles(c, size, COST[name]), f"{us:.2f}", c.store_bytes, c.tile_k])


def report(path):
    rows = list(csv.DictReader(path.open()))
    points = {}
    for r in rows:
        points.setdefault((r["op"], r["m"], r["n"], r["k"]), []).append(r)
    print("op m n k: mm addmm | chosen | best of ours")
    for key, each in points.items():
        if not any(r['contender'] == 'ours' for r in each):
            continue
        t = {r["contender"]: float(r["us"]) for r in each if r["contender"] != "ours"}
        ours = [r for r in each if r["contender"] == "ours"]
        best = min(ours, key=lambda r: float(r["us"]))
        picked = next((r for r in ours if r["chosen"] == "1"), best)
        say = lambda r: f"{r['us']} {r['form'][:4]} {r['tile_m']}x{r['tile_n']} {r['cluster_m']}{r['cluster_n']}{r['cluster_k']} {r['tile_k']}"
        print(*key, t.get("mm"), t.get("addmm"), "|", say(picked), "|", say(best))


main()
sys.stdout.flush()
os._exit(0)
