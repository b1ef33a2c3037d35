import json, os, sys, time
began = time.time()
import torch
import transformers
from torch._dynamo.utils import counters

name, run = sys.argv[1:3]
device = os.environ.get("WARM_DEVICE", "cuda")
small = device == "cpu"
from cute_ops_torch import inductor
from cute_ops.jit import cache

config = transformers.LlamaConfig(
    hidden_size=256 if small else 2048, intermediate_size=256 if small else 5632, num_hidden_layers=2 if small else 4,
    num_attention_heads=2 if small else 16, num_key_value_heads=1 if small else 8, head_dim=128, vocab_size=32000, use_cache=False,
)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).train()
tokens = torch.randint(0, 32000, (2, 32 if small else 1024), device=device)
if not small:
    torch.ones(1, device=device).sum().item()
imported = time.time()
if name == "pass":
    inductor.enable(devices=(device,), logits=False)
step = torch.compile(model)
losses = []
times = []
for k in range(3):
    start = time.time()
    loss = step(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if not small:
        torch.cuda.synchronize()
    times.append(time.time() - start)
    losses.append(loss.item())
    model.zero_grad()
made = counters["inductor"]
print(json.dumps({
    "what": f"{name} {run}", "first step s": round(times[0], 2), "second s": round(times[1], 2), "third s": round(times[2], 4),
    "import s": round(imported - began, 1), "cute kernels compiled": cache.counters.compiled, "from disk": cache.counters.disk,
    "aot cache hit": counters["aot_autograd"]["autograd_cache_hit"], "aot miss": counters["aot_autograd"]["autograd_cache_miss"],
    "fx hit": made["fxgraph_cache_hit"], "fx miss": made["fxgraph_cache_miss"],
    "put in": sum(inductor.replaced.values()), "loss": round(losses[0], 4), "torch": torch.__version__,
}), flush=True)
