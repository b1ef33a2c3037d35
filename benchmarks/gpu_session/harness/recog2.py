import sys; sys.argv=["x","75"]
sys.path.insert(0,".")
from recog import *
import cProfile, pstats
m = module_of(75)
run(m)
p = cProfile.Profile(); p.enable()
for _ in range(5): run(m)
p.disable()
s = pstats.Stats(p)
for f in ("builtins.any", "'get' of 'dict'", "'append' of 'list'", "builtins.len", "builtins.isinstance", "builtins.max"):
    s.sort_stats("ncalls").print_callers(f)
s.sort_stats("cumtime").print_stats(70)
