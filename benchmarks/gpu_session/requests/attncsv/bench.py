"""attention.csv: ours, cuDNN, FlashAttention 4; listed shapes, soft caps and windows, drawn shapes."""
import random, sys, time
from pathlib import Path
import attention as A
from common import Table
import os
SEED, BUDGET = 90517, float(os.environ.get("LEFT", 100))
rng = random.Random(SEED)
drawn = [A.drawn(rng) for _ in range(20)]
A.FORMS["causal, softcap 30"] = {"causal": True, "softcap": 30.0}
OURS, DNN, FA4 = "ours", "cuDNN", "FlashAttention 4"
cases = []
for d in A.PRODUCTS:
    for f in ("causal", "full"):
        cases += [(A.Case(s, f, d), [OURS, DNN, FA4]) for s in A.SHAPES]
    cases += [(A.Case(A.SHAPES[i], "window of 1024", d), [OURS, FA4]) for i in (0, 3)]
    cases += [(A.Case(A.SHAPES[i], f"causal, softcap {c}", d), [OURS] + [FA4] * (d == "forward" and c == 50)) for i in (0, 3) for c in (50, 30)]
    for i, s in enumerate(drawn):
        cases.append((A.Case(s, ("causal", "full")[i % 2], d), [OURS, DNN, FA4]))
if sys.argv[1] == "warm":
    # a small shape of the same heads compiles the same kernels
    i, n = map(int, sys.argv[2:])
    seen, todo = set(), []
    for case, names in cases:
        for name in names:
            # the kernels of ours depend on the head dim alone, FA4's on how many heads share keys, too
            key = (name, case.form, case.direction, case.shape.headdim, case.shape.heads // case.shape.kv_heads if name == FA4 else 0)
            if key not in seen and name != DNN:
                seen.add(key); todo.append((case._replace(shape=case.shape._replace(batch=1, seqlen=min(case.shape.seqlen, 1024))), [name]))
    todo.sort(key=lambda x: (x[1], x[0].direction, x[0].shape.headdim))
    print(len(todo), "kernels")
    for case, names in todo[i::n]:
        for row in A.measure(case, names, 1):
            print(row["contender"], case, row["status"], flush=True)
    sys.exit()
start = time.time()
table = Table(Path(sys.argv[2]) / "attention.csv", A.COLUMNS)
times = {}
order = [c for c in cases if c[0].shape not in drawn] + [c for c in cases if c[0].shape in drawn]
for case, names in order:
    if time.time() - start > BUDGET:
        print("out of time at", case); break
    rows = A.measure(case, names, 5)
    for row in rows: table.add(row)
    us = {r["contender"]: r.get("us") for r in rows}; times[case] = us
    best = min((v for k, v in us.items() if k != OURS and v), default=None)
    s = case.shape
    print(f"{case.direction[:3]} {s.batch}x{s.seqlen} {s.heads}/{s.kv_heads} d{s.headdim} {case.form}: " + ", ".join(f"{k} {v:.0f}" if v else f"{k} -" for k, v in us.items()) + (f"  best/ours {best / us[OURS]:.3f}" if best and us[OURS] else ""), flush=True)
    bad = [r["status"] for r in rows if r["status"] != "ok"]
    if bad: print("   ", bad)
    A.torch.cuda.empty_cache()
import math
for where, name in ((lambda c: c.shape not in drawn, "listed"), (lambda c: c.shape in drawn, "drawn")):
    for d in A.PRODUCTS:
        for other in (DNN, FA4):
            r = [u[other] / u[OURS] for c, u in times.items() if where(c) and c.direction == d and c.form in ("causal", "full") and u.get(other) and u.get(OURS)]
            if r: print(f"{name} {d} {other}/ours: n {len(r)} geometric mean {math.exp(sum(map(math.log, r)) / len(r)):.3f} worst {min(r):.3f}")
        for c in (50, 30):
            for i in (0, 3):
                a, b = times.get(A.Case(A.SHAPES[i], "causal", d)), times.get(A.Case(A.SHAPES[i], f"causal, softcap {c}", d))
                if name == "listed" and a and b and a[OURS] and b[OURS]: print(f"soft cap {c} {d} d{A.SHAPES[i].headdim}: +{100 * (b[OURS] / a[OURS] - 1):.1f}%")
