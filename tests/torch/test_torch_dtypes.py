"""Functions of tiles of several dtypes, outputs that say theirs, and gradients of what is expanded, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cute_ops import testing
from cute_ops_torch import fused
from cute_ops_torch.tools.runner import to_numpy
from tests.ops import mixing
from tests.ops.mixing import Mixed

DRAWN = [*mixing.drawn(1, 18)]
TORCH = {"F": torch.float32, "H": torch.float16, "B": torch.bfloat16}
ROW = {"axis": -1, "keepdims": True}


def tensors(mixed: Mixed, device: str = "cpu", rows: tuple[int, ...] = (3, 4), n: int = 24) -> list[torch.Tensor]:
    """Tiles of the drawn dtypes; a row vector and an expanded tile in bfloat16."""
    rng, letters, found = torch.Generator().manual_seed(0), iter(mixed.letters), []
    for kind in mixing.FUNCTIONS[mixed.function].replace("2t", "T"):
        shape = (n,) if kind == "r" else (rows[0], 1, n) if kind == "e" else (*rows, n * (1 + (kind == "T")))
        dtype = TORCH[next(letters)] if kind in "tT" else torch.bfloat16
        found.append(torch.randn(shape, generator=rng).to(device, dtype).requires_grad_())
    return found


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(mixed: Mixed, given: Sequence[torch.Tensor]) -> None:
    """Outputs and gradients against float64, by the tolerance rule, where the operands have these dtypes."""
    op = mixed.op
    outputs = as_tuple(fused(mixed.function)(*given))
    wide = [t.detach().broadcast_to(outputs[0].shape) if mixing.is_expanded(t) else t.detach() for t in given]
    arrays = {name: to_numpy(t.contiguous()) for name, t in zip(op.inputs, wide, strict=True)}
    testing.check(op, arrays, {}, tuple(to_numpy(out.detach()) for out in outputs))
    cotangents = [torch.randn_like(out) for out in outputs]
    found = torch.autograd.grad(outputs, given, cotangents)
    assert [t.dtype for t in found] == [t.dtype for t in given]
    known = arrays | {name: to_numpy(out.detach()) for name, out in zip(op.outputs, outputs, strict=True)}
    known |= {f"d{name}": to_numpy(c) for name, c in zip(op.outputs, cotangents, strict=True)}
    gradients = dict(zip((f"d{name}" for name in op.inputs), map(to_numpy, found), strict=True))
    for name, out in op.handed_on.items():
        np.testing.assert_array_equal(gradients[f"d{name}"], known[f"d{out}"].astype(gradients[f"d{name}"].dtype))
    if not any(map(mixing.is_expanded, given)):
        results = tuple(gradients[name] for name in op.grad.outputs)
        declared = testing.run_reference(op.grad, {name: known[name] for name in op.grad.inputs}, {})
        results = tuple(None if d is None else r.astype(d.dtype) for r, d in zip(results, declared, strict=True))
        testing.check(op.grad, {name: known[name] for name in op.grad.inputs}, {}, results)


@pytest.mark.parametrize("mixed", DRAWN, ids=lambda mixed: f"{mixed.op.name[:-13]}_{mixed.letters}")
def test_values_and_gradients(mixed: Mixed) -> None:
    check(mixed, tensors(mixed))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [24, 97, 1032, 4096])
@pytest.mark.parametrize("mixed", [*mixing.drawn(2, 27)], ids=lambda mixed: f"{mixed.op.name[:-13]}_{mixed.letters}")
def test_values_and_gradients_on_a_gpu(mixed: Mixed, n: int) -> None:
    check(mixed, tensors(mixed, "cuda", (5, 7), n))


def test_dtypes_under_compile_and_in_raw_ops() -> None:
    function = fused(mixing.momentum)
    x, y, z = torch.randn(3, 8).bfloat16(), torch.randn(3, 8), torch.randn(3, 8).half()
    outputs = function(x, y, z)
    assert [out.dtype for out in outputs] == [torch.float32, torch.float16]
    assert [out.dtype for out in function(x, x, x)] == [torch.bfloat16, torch.bfloat16]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for given in ((x, y, z), (y, x, x)):
        for out, wanted in zip(compiled(*given), function(*given), strict=True):
            assert torch.equal(out, wanted) and out.dtype == wanted.dtype
    op = mixing.of(mixing.momentum, "BFH").op
    torch.library.opcheck(getattr(torch.ops.cute, op.name).default, (x.requires_grad_(), y, z))


def test_a_log_sum_exp_of_16_bits_is_as_right_as_one_of_32() -> None:
    @fused
    def log_sum_exp(xp, x):
        top = xp.max(x, **ROW)
        return top + xp.log(xp.sum(xp.exp(x - top), **ROW))

    x = torch.randn(4, 512).bfloat16()
    out = log_sum_exp(x)
    assert (out.dtype, out.shape) == (torch.float32, (4, 1))
    torch.testing.assert_close(out.double(), x.double().logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transform", ["plain", "compile", "func"])
def test_gradients_of_what_is_expanded_are_rounded_once(transform: str) -> None:
    @fused
    def modulate(xp, x, scale, shift):
        return x * (1 + scale) + shift

    torch.manual_seed(0)
    x, cotangent = torch.randn(2, 2048, 16).bfloat16(), torch.randn(2, 2048, 16).bfloat16()
    scale, shift = torch.randn(2, 1, 16).bfloat16(), torch.randn(2, 1, 1).bfloat16()
    exact = (cotangent.double() * x.double()).sum(1, keepdim=True), cotangent.double().sum((1, 2), keepdim=True)

    def loss(scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        run = torch.compile(modulate, fullgraph=True, backend="aot_eager") if transform == "compile" else modulate
        return (run(x, scale, shift).float() * cotangent.float()).sum()

    if transform == "func":
        found = torch.func.grad(loss, (0, 1))(scale, shift)
    else:
        found = torch.autograd.grad(loss(scale.requires_grad_(), shift.requires_grad_()), (scale, shift))
    for gradient, wanted in zip(found, exact, strict=True):
        # Not more than the rounding, and what sums in float32 lose.
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), wanted, rtol=2.0**-8, atol=1e-4)
