"""A share of test_gpu_expressions' programs of a seed: expressions.py LANE LANES SECONDS"""
import sys, time
import tests.jax.test_gpu_expressions as t
from tests.ops.random_programs import drawn
from cute_ops.tools import verify
lane, lanes, seconds = map(int, sys.argv[1:4])
begin = time.perf_counter()
every = [*drawn(266010093, t.COUNT)]
mine = [(i, one) for i, one in enumerate(every) if i % lanes == lane]
runners = verify.installed(("torch", "jax"))
print({k: r.device() for k, r in runners.items()}, len(mine), flush=True)
done = wrong = 0
for at in range(0, len(mine), 8):
    part = mine[at : at + 8]
    if time.perf_counter() - begin > seconds: break
    try: t.compile_all([one for _, one in part])
    except Exception as e: print(f"compile {part[0][0]}..: {type(e).__name__}: {str(e)[:300]}", flush=True)
    for i, one in part:
        try: t.check(one, runners if i % 2 else {"torch": runners["torch"]})
        except Exception as e:
            wrong += 1; print(f"WRONG {i}: {type(e).__name__} {str(e)[:400]} of {one.case.dims} {one.dtype}\n{one.programs}", flush=True)
        done += 1
print(f"lane {lane}: {done} of {len(mine)} programs, {wrong} wrong, {time.perf_counter() - begin:.0f} s", flush=True)
