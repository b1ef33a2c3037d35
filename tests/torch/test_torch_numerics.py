"""Values at the edges: infinities, NaN, the largest and the smallest numbers, empty rows, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cute_ops_torch
from cute_ops_torch import optim
from cute_ops_torch.optim import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Function = Callable[..., torch.Tensor]


def compare(ours: Function, theirs: Function, *inputs: torch.Tensor, wide: bool = False, **limits: float) -> None:
    """Values and gradients, special ones included; ``wide``: against theirs in float64."""
    results = []
    for function in (ours, theirs):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        given = [t.double() for t in leaves] if wide and function is theirs else leaves
        out = function(*given).to(inputs[0].dtype)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*results, equal_nan=True, **limits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_of_special_rows(smoothing: float, device: str) -> None:
    """Classes of no probability, also as targets; differences beyond float32; one class; nothing but ignored rows."""
    torch.manual_seed(1)
    x, few = torch.randn(4, 9, device=device), torch.tensor([0, 1, 2, 1], device=device)
    masked = x.masked_fill(torch.arange(9, device=device) == 3, -inf)
    huge = torch.tensor([[3e38, -3e38, 0], [1e38] * 3, [-3e38] * 3, [3.4e38, 0, 0]], device=device)
    rows = [
        (masked, few), (masked, torch.full_like(few, 3)), (huge, few), (x[:, :1], torch.zeros_like(few)),
        (x, torch.full_like(few, -100)), (x[:0], few[:0]), (x * 1e-42, few), (1e6 * x, few),
    ]  # fmt: skip
    for logits, target in rows:
        for reduction in ("mean", "sum", "none"):
            options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
            functions = (cute_ops_torch.cross_entropy, F.cross_entropy)
            calls = [lambda x, f=f, t=target, o=options: f(x, t, **o) for f in functions]
            compare(*calls, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_targets_beyond_32_bits_are_no_classes(device: str) -> None:
    """Not what is left of them in 32 bits."""
    x = torch.randn(3, 9, device=device)
    target = torch.tensor([2**32 + 1, -(2**32) + 1, 1], device=device)
    loss = cute_ops_torch.cross_entropy(x, target, reduction="none")
    assert loss[:2].isnan().all() and loss[2].isfinite()
    ignored = cute_ops_torch.cross_entropy(x, target, reduction="none", ignore_index=2**32 + 1)
    assert ignored[0] == 0 and ignored[1].isnan() and ignored[2] == loss[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_norms_of_constant_rows_and_weights_of_zeros(eps: float, device: str) -> None:
    x = torch.tensor([[0.0] * 33, [5.0] * 33, [-1e4] * 33], device=device)
    weight, limits = torch.zeros(33, device=device), {"rtol": 1e-5, "atol": 1e-6}
    ours, theirs = partial(cute_ops_torch.rmsnorm, eps=eps), lambda x, w=None: F.rms_norm(x, (33,), w, eps)
    compare(ours, theirs, x, weight, **limits)
    compare(lambda x: ours(x)[1:], lambda x: theirs(x)[1:], x, **limits)
    out = cute_ops_torch.layernorm(x, None, eps=eps)
    torch.testing.assert_close(out, F.layer_norm(x, (33,), eps=eps), equal_nan=True, **limits)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_beyond_its_range(device: str) -> None:
    """Squares and sums are float32's; what is rounded overflows where PyTorch's does."""
    x = torch.full((2, 64), 60000.0, device=device).half()
    assert (cute_ops_torch.mean(x) == 60000).all() and cute_ops_torch.sum(x).isinf().all()
    assert (cute_ops_torch.rmsnorm(x) == 1).all()
    _, residual = cute_ops_torch.add_rmsnorm(x, x)
    assert residual.isinf().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_adamw_of_special_gradients(eps: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our kernel: PyTorch's of many gives NaN where squares overflow twice."""
    monkeypatch.setattr(optim, "SMALL", 0)
    gradient = torch.tensor([0.0, 1e-30, 1e-22, 1e-3, 1e15, 1e25, 3e38, nan], device=device)
    ours, theirs = (torch.nn.Parameter(torch.ones(8, device=device)) for _ in range(2))
    for parameter, kind in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind([parameter], lr=0.1, eps=eps)
        for _ in range(2):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-6)
