import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
from cute_ops.jit import target
target.device_count = lambda *a, **k: 1
