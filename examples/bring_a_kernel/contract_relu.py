"""A kernel file of ``kernel_fn``, ``reference_fn`` and ``get_inputs``, without an op: verify and bench take it."""

import planned_relu
import torch

import cute_ops_torch

kernel_fn = cute_ops_torch.register(planned_relu.planned_relu)  # yours may call cute.compile


def reference_fn(x):
    return torch.relu(x)


def get_inputs():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [torch.randn(1024, 512, dtype=torch.float16, device=device)]
