"""Rotary tables that broadcast over x, along whichever of its leading dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops.ops import OPS
from cute_ops_torch.host.launch import Launcher

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEADS = [(5, 1), (1, 3), (5, 3), (3,), (1,), (1, 1), ()]
rope = next(op for op in OPS if op.name == "rope")


def problem(lead: tuple[int, ...], device: str = "cpu") -> tuple[torch.Tensor, tuple[Any, Any], tuple[Any, Any]]:
    """Heads of 5 positions and 3 sequences, tables with these leading dims, and the same tables written out."""
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 2, 64, device=device), torch.randn(*lead, 32, device=device)
    whole = angles.expand(5, 3, 32).contiguous()
    return x, (angles.cos(), angles.sin()), (whole.cos(), whole.sin())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_tables_of_joined_gradients_broadcast(lead: tuple[int, ...], device: str) -> None:
    x, tables, whole = problem(lead, device)
    joined = [torch.ops.cute.rope_bwd_joined(x, x, x, *given) for given in (tables, whole)]
    torch.testing.assert_close(*joined, rtol=0, atol=0)


def test_kernels_read_such_tables_in_place(compiled: Any) -> None:
    x, tables, whole = problem((5, 1))
    found = Launcher(rope).launch(x, *tables)
    torch.testing.assert_close(found, Launcher(rope).launch(x, *whole), rtol=0, atol=0)
    cos = compiled.variants[0].tensors["cos"]
    assert (cos.layout, cos.shape) == ("strided", (None, None, 32))


def test_inplace_backward_leaves_a_cotangent_that_shares_memory() -> None:
    x, cos, sin = torch.randn(5, 3, 8, requires_grad=True), torch.rand(5, 4), torch.rand(5, 4)
    cotangent = torch.randn(3, 8)
    outs = [cute_ops_torch.rope(x, cos, sin, inplace_backward=inplace).sum(0) for inplace in (True, False)]
    torch.testing.assert_close(*[torch.autograd.grad(out, x, cotangent) for out in outs])
