"""Values and gradients of a function beside a reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape) + sum(shape)))


def alike(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Any, **near: float) -> None:
    """Values and gradients of all floats, by a reference in float64."""
    results = []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        moved = [
            x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs
        ]
        outs = function(*moved)
        outs = [outs] if isinstance(outs, Tensor) else list(outs)
        torch.autograd.backward(outs, [drawn(*out.shape).to(out.dtype) for out in outs])
        grads = [x.grad for x in moved if isinstance(x, Tensor) and x.requires_grad]
        results.append([x.detach().double() for x in (*outs, *grads)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 1e-4, "atol": 1e-5} | near))
