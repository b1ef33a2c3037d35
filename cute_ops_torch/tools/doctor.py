"""The part of ``python -m cute_ops doctor`` that examines PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_ops.jit.target import device_count
from cute_ops.tools.doctor import Finding
from cute_ops_torch import functions

OLDEST = (2, 11)


def examine() -> Iterator[Finding]:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        yield Finding("bad", f"torch {torch.__version__} is too old", f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'")
        return
    yield Finding("ok", f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if not torch.cuda.is_available() and device_count():
        yield Finding("bad", "a GPU is here but this torch cannot use it", "install a CUDA build of torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(33, 1024, device=device)
    weight = torch.rand(1024, device=device)
    got = functions.rmsnorm(x, weight)
    error = (got - torch.nn.functional.rms_norm(x, (1024,), weight, 1e-6)).abs().max().item()
    if error < 1e-4:
        yield Finding("ok", f"torch.ops.cute.rmsnorm runs on {device}")
    else:
        yield Finding(
            "bad", f"torch.ops.cute.rmsnorm on {device} is wrong by {error:.2g}", "python -m cute_ops cache clear"
        )
