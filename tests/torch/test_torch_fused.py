"""Ops of functions in PyTorch: values and gradients against float64 autograd, torch.compile, vmap, opcheck."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from array_api_compat import torch as xp

from cute_ops import Op
from cute_ops.expressions import evaluate, trace
from cute_ops_torch import fused, register

sys.path.append(str(Path(__file__).parents[1] / "core" / "kernels"))
import fusing
import reducing

PLAIN = [*fusing.PLAIN, *reducing.PLAIN]

each = pytest.mark.parametrize("declared", PLAIN, ids=lambda op: op.name)


def tensors(declared: Op) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    shapes = [t.of({"m": (3, 2), "n": 8}) for t in declared.inputs.values()]
    return [torch.tensor(rng.standard_normal(shape), dtype=torch.float32, requires_grad=True) for shape in shapes]


def function_of(declared: Op) -> Callable[..., Any]:
    return getattr(fusing, declared.name, None) or getattr(reducing, declared.name)


def as_tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@each
def test_values_and_gradients(declared: Op) -> None:
    given = tensors(declared)
    wide = [t.detach().double().requires_grad_() for t in given]
    expression = trace(function_of(declared), {name: t.shape for name, t in declared.inputs.items()})
    found, exact = as_tuple(register(declared)(*given)), evaluate(expression, xp, wide)
    cotangents = [torch.randn(out.shape, dtype=torch.float64) for out in exact]
    for out, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(found, given, [c.float() for c in cotangents])
    for gradient, wanted in zip(gradients, torch.autograd.grad(exact, wide, cotangents), strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-5)


@each
def test_the_op_is_a_good_citizen(declared: Op) -> None:
    register(declared)
    torch.library.opcheck(getattr(torch.ops.cute, declared.name).default, tuple(tensors(declared)))


@each
def test_compile_and_vmap_give_the_same_bits(declared: Op) -> None:
    function, given = register(declared), tensors(declared)
    outputs = as_tuple(function(*given))
    for out, wanted in zip(as_tuple(torch.compile(function, fullgraph=True)(*given)), outputs, strict=True):
        assert torch.equal(out, wanted)
    stacked = [torch.stack([t, 2 * t]).detach() for t in given]
    for out, wanted in zip(as_tuple(torch.vmap(function)(*stacked)), outputs, strict=True):
        assert torch.equal(out[0], wanted)


def test_a_decorated_function_is_called_without_a_namespace() -> None:
    @fused(operands={"x": "*m n", "weight": "n"}, namespace="fused_tests")
    def weighted(xp, x, weight):
        """The tanh of x, weighted."""
        return xp.tanh(x) * weight

    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(weighted(x, weight=weight), torch.tanh(x) * weight)
    assert weighted.__doc__ == "The tanh of x, weighted."
    assert torch.ops.fused_tests.weighted(x, weight).shape == x.shape


def test_rows_without_elements() -> None:
    of_nothing = fused(operands={"x": "*m n"}, namespace="fused_tests")(reducing.of_nothing)
    x = torch.ones(3, 0, requires_grad=True)
    torch.testing.assert_close(
        torch.cat(of_nothing(x), -1), torch.tensor([[0, np.nan, -np.inf, np.inf]] * 3), equal_nan=True
    )
    of_nothing(x)[2].sum().backward()
    assert x.grad.shape == x.shape


def test_a_decorator_without_shapes_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r'@cute_ops_torch.fused\(operands=\{"x": "\*m n", "y": "\*m n"\}\)'):

        @fused
        def both(xp, x, y):
            return x + y
