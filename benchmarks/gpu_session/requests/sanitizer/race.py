"""racecheck of drawn ops at 129 columns, and memcheck of others at 4097, each a process of a few ops."""
import os, random, shutil, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.torch.sanitized_calls import every_op
begin = time.perf_counter()
CALLS = Path("tests/torch/sanitized_calls.py")
sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
print(sanitizer, Path(sanitizer).exists(), flush=True)
rng = random.Random(20261129)
every = [*every_op()]; rng.shuffle(every)
raced = every[:44]; checked = every[44:84]
first = [n for n in every if n.startswith(("group_norm", "adamw", "mla", "decode", "attention"))]
raced = list(dict.fromkeys([*first, *raced]))[:48]
if "--cpu" in sys.argv: print(len(every), raced, checked); sys.exit()
def words(ops): return [w for op in ops for w in ("--op", op)]
groups = [("racecheck", "129", raced[i::12]) for i in range(12)] + [("memcheck", "4097", checked[i::10]) for i in range(10)]
def work(job):
    tool, n, ops = job
    left = lambda: 100 - (time.perf_counter() - begin)
    try:
        b = subprocess.run([sys.executable, str(CALLS), n, "--build", *words(ops)], capture_output=True, text=True, timeout=max(1, left()))
        if b.returncode: return tool, ops, f"build {b.returncode} {b.stderr[-200:]}"
        cmd = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--destroy-on-device-error", "kernel", sys.executable, str(CALLS), n, *words(ops)]
        r = subprocess.run(cmd, capture_output=True, text=True, timeout=max(1, left()), env={**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"], "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    except subprocess.TimeoutExpired: return tool, ops, "out of time"
    return tool, ops, "ok " + r.stdout.strip().splitlines()[-1][-120:] if r.returncode == 0 else f"rc {r.returncode}\n{r.stdout[-1800:]}"
done = dict(racecheck=0, memcheck=0)
with ThreadPoolExecutor(11) as threads:
    for tool, ops, said in threads.map(work, groups):
        done[tool] += len(ops) * said.startswith("ok")
        print(tool, ",".join(ops), said, round(time.perf_counter() - begin), flush=True)
print("clean ops", done, "of", len(raced), len(checked))
