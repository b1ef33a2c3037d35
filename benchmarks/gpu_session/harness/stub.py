"""Host time on a CPU: kernels are stubs that do nothing."""
import sys, time, gc
sys.path.insert(0, "."); sys.path.insert(0, "benchmarks")
import torch
torch.set_num_threads(1)
from cute_ops.jit import cache, target
from cute_ops_torch.host import launch
from cute_ops_torch import registry
count = [0]
def get(variant):
    def kernel(*given):
        count[0] += 1
    return kernel
cache.get = get
target.of_device = lambda index: target.parse("sm_90a")
launch.torch.cuda.device_count = lambda: 1
registry.Registered._devices = property(lambda self: ("cpu", "cuda"))
import host_time
def entries(grad): return host_time.composites(torch.device("cpu"), grad)
def best(call, n=200, rounds=15):
    for _ in range(10): call()
    t = []
    for _ in range(rounds):
        b = time.perf_counter()
        for _ in range(n): call()
        t.append((time.perf_counter() - b) / n * 1e6)
    return min(t), sorted(t)[len(t)//2]
if __name__ == "__main__":
    for grad in (False, True):
        for name, make in entries(grad).items():
            if name.endswith("parts"): continue
            call = make()
            for _ in range(5): call()
            count[0] = 0; call(); k = count[0]
            b, m = best(call)
            print(f"{grad} {name:50} kernels {k} best {b:.1f} median {m:.1f}", flush=True)
