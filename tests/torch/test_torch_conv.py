"""Causal convolutions: as torch's own, in pieces, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cute_ops_torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(s: int, width: int, device: str = "cpu") -> list[torch.Tensor]:
    """x, weight, bias and initial state of two sequences of twelve channels."""
    torch.manual_seed(0)
    shapes = ((2, s, 12), (12, width), (12,), (2, width - 1, 12))
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def by_torch(x: Any, weight: Any, bias: Any = None, state: Any = None, activation: str = "none") -> tuple[Any, Any]:
    """The same by torch's convolution of (batch, channels, seqlen)."""
    taps = weight.shape[1] - 1
    padded = F.pad(x, (0, 0, taps, 0)) if state is None else torch.cat([state, x], 1)
    out = F.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    return F.silu(out) if activation == "silu" else out, padded[:, -taps:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optional", [0, 1, 2])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(("s", "width"), [(1, 4), (2, 4), (50, 4), (1, 3), (17, 3), (9, 2)])
def test_as_torch_convolves(s: int, width: int, activation: str, optional: int, device: str) -> None:
    given = problem(s, width, device)[: 2 + optional]
    found, expected = (f(*given, activation=activation) for f in (cute_ops_torch.causal_conv1d, by_torch))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    gradients = [torch.autograd.grad(out.sin().sum() + final.cos().sum(), given) for out, final in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_in_pieces(device: str) -> None:
    """Each piece starts with the state that the one before has left, and gradients go the same way back."""
    x, weight, bias, first = problem(50, 4, device)
    whole, last = cute_ops_torch.causal_conv1d(x, weight, bias, first, activation="silu")
    pieces, state = [], first
    for piece in x.split([1, 2, 30, 17], 1):
        out, state = cute_ops_torch.causal_conv1d(piece, weight, bias, state, activation="silu")
        pieces.append(out)
    torch.testing.assert_close((torch.cat(pieces, 1), state), (whole, last), rtol=0, atol=0)
    gradients = [
        torch.autograd.grad(out.sin().sum() + final.cos().sum(), (x, weight, bias, first))
        for out, final in ((whole, last), (torch.cat(pieces, 1), state))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_others_are_refused() -> None:
    x, weight, bias, state = problem(5, 4)
    with pytest.raises(ValueError, match=r"argument `weight` has w=5, expected 2, 3 or 4\."):
        cute_ops_torch.causal_conv1d(x, torch.randn(12, 5))
    with pytest.raises(ValueError, match=r"argument `initial_state` has w-1=2, but w=4\."):
        cute_ops_torch.causal_conv1d(x, weight, bias, state[:, 1:])
    with pytest.raises(ValueError, match=r"argument `dfinal_state` has w-1=2, but w=4\."):
        torch.ops.cute.causal_conv1d_bwd(x, weight, x, None, None, state[:, 1:])
