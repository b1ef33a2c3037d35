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
def test_tables_broadcast_along_any_leading_dim(lead: tuple[int, ...], device: str) -> None:
    x, tables, whole = problem(lead, device)
    x.requires_grad_()
    found, expected = (cute_ops_torch.rope(x, *given) for given in (tables, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gradients = [torch.autograd.grad(out.sin().sum(), x)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    joined = [torch.ops.cute.rope_bwd_joined(x.detach(), x.detach(), x.detach(), *given) for given in (tables, whole)]
    torch.testing.assert_close(*joined, rtol=0, atol=0)


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_under_vmap(lead: tuple[int, ...]) -> None:
    x, tables, whole = problem(lead)
    several = torch.stack([x, -x])
    expected = torch.stack([cute_ops_torch.rope(each, *whole) for each in several])
    torch.testing.assert_close(torch.vmap(lambda x: cute_ops_torch.rope(x, *tables))(several), expected)
    both = [torch.stack([t, t]) for t in tables]
    torch.testing.assert_close(torch.vmap(cute_ops_torch.rope)(several, *both), expected)
    torch.testing.assert_close(torch.vmap(lambda *t: cute_ops_torch.rope(x, *t))(*both)[1], expected[0])


def test_kernels_read_such_tables_in_place(compiled: Any) -> None:
    x, tables, whole = problem((5, 1))
    found = Launcher(rope).launch(x, *tables)
    torch.testing.assert_close(found, Launcher(rope).launch(x, *whole), rtol=0, atol=0)
    cos = compiled.variants[0].tensors["cos"]
    assert (cos.layout, cos.shape) == ("strided", (None, None, 32))


def test_others_are_refused() -> None:
    x, _, _ = problem((5, 3))
    with pytest.raises(
        ValueError, match=r"argument `cos` has leading dims \(5,\), expected the last ones of \*m=\(5, 3\), or 1\."
    ):
        cute_ops_torch.rope(x, torch.randn(5, 32), torch.randn(5, 32))
