import sys
sys.path.insert(0, "benchmarks")
from torch.profiler import ProfilerActivity, profile
import llama_step
trainer = llama_step.Trainer("ours", 4, 4096, False)
with profile(activities=[ProfilerActivity.CUDA]) as seen:
    trainer.step(); trainer.wait()
events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
print(sum(e.self_device_time_total for e in events), "us of kernels")
for e in events[:60]:
    print(f"{e.self_device_time_total:9.0f} {e.count:5} {e.key[:150]}")
