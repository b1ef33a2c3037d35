"""Ours in JAX beside ours in PyTorch, cuDNN by jax.nn, FlashAttention 3, tokamax; compiled in threads, timed in turns."""
import sys, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
import attention as A
import torch
from common import Table, first_line, spread
start, BUDGET = time.time(), 88
table = Table(Path(sys.argv[1]) / "attention_jax.csv", A.COLUMNS)
S = A.SHAPES
cases = [A.Case(S[i], f, d) for i, f in ((0, "causal"), (3, "causal"), (0, "full"), (1, "causal"), (4, "causal")) for d in A.PRODUCTS]
names = ["ours", "ours in JAX", "jax.nn cuDNN", "FlashAttention 3 in JAX", "tokamax"]
pool, made = ThreadPoolExecutor(8), {}
def build(case, given, name, contender, row):
    try:
        row["error"] = A.error(case.form, given, contender(*given))
        backward = case.direction == "backward"
        run = contender.run(given, backward) if isinstance(contender, A.InJax) else A.gradients(contender, given) if backward else partial(contender, *given)
        out = run()
        if isinstance(contender, A.InJax): contender.jax.block_until_ready(out)
        row["status"] = "ok"
        return run
    except Exception as failure:
        row["status"] = "failed: " + first_line(failure)[:150]
for case in cases:
    b, s, h, g, d = case.shape
    gen = torch.Generator("cuda").manual_seed(0)
    given = [torch.randn(b, s, n, d, device="cuda", dtype=torch.bfloat16, generator=gen) for n in (h, g, g)]
    every = {**A.contenders(case.form), **A.in_jax(case.form)}
    made[case] = (given, {n: (every[n], row := {"contender": n, **case.shape._asdict(), "form": case.form, "direction": case.direction}, pool.submit(build, case, given, n, every[n], row)) for n in names})
for case, (given, every) in made.items():
    if time.time() - start > BUDGET: print("out of time at", case); break
    runs = {n: f.result() for n, (_, _, f) in every.items()}
    if case is cases[0]:
        for _, others in list(made.values())[1:]:
            for _, _, f in others.values(): f.result()
        print(f"compiled after {time.time() - start:.0f} s", flush=True)
    samples = {n: [] for n, r in runs.items() if r}
    for _ in range(5):
        for n in samples:
            c = every[n][0]
            if isinstance(c, A.InJax):
                torch.cuda.synchronize(); us = c.sample(runs[n])
            else: us = A.elapsed(lambda r=runs[n]: [r() for _ in range(A.CALLS)])
            samples[n].append(us / A.CALLS)
    text = []
    for n, (_, row, _) in every.items():
        if samples.get(n):
            m, low, high = spread(samples[n])
            row |= {"us": m, "us_min": low, "us_max": high, "tflops": case.operations / m / 1e6}
            text.append(f"{n} {m:.0f} (err {row.get('error', 0):.1e})")
        else: text.append(f"{n} {row['status']}")
        table.add(row)
    ratio = spread(samples["ours in JAX"]).median / spread(samples["ours"]).median if samples.get("ours in JAX") and samples.get("ours") else 0
    print(case.direction[:3], *case.shape, case.form, "|", "; ".join(text), f"| JAX / torch {ratio:.3f}", flush=True)
