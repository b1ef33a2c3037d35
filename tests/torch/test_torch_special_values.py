"""Every word at special numbers, values and gradients: as PyTorch's own functions have them."""

from __future__ import annotations

import pytest
import torch

from cute_ops_torch import fused
from tests.ops import special

TABLE = special.words(torch, None)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TABLE)
def test_values_and_gradients(name: str, device: str) -> None:
    word = TABLE[name]
    arrays = [special.ROWS] if word.rows else special.pairs(len(word.operands))
    given = [torch.tensor(a, device=device, requires_grad=True) for a in arrays]
    own = [t.detach().cpu().requires_grad_() for t in given]
    out, theirs = fused(word.ours, name="special")(*given), word.torch(*own)
    gradients = torch.autograd.grad(out, given, torch.full_like(out, 1.5))
    wanted = torch.autograd.grad(theirs, own, torch.full_like(theirs, 1.5), allow_unused=True)
    names = ("out", "dx", "dy", "dz")
    found, every = (dict(zip(names, each, strict=False)) for each in ((out, *gradients), (theirs, *wanted)))
    for what, got in found.items():
        ours = got.detach().cpu().numpy()
        exact = torch.zeros_like(own[0]) if every[what] is None else every[what]
        exact = exact.detach().broadcast_to(ours.shape).numpy()
        wrong = special.differ(ours, exact)
        if (name, what) in special.NOT_TORCH:
            wrong &= ~special.NOT_TORCH[name, what](*arrays)
        if device == "cuda":  # a kernel's reciprocals take subnormal numbers for 0
            small = special.is_subnormal(*arrays) | special.is_huge(*arrays)
            wrong &= ~(small.any(-1, keepdims=True) if word.rows else small)
        assert not wrong.any(), special.told(name, what, wrong, arrays if not word.rows else [], ours, exact)
