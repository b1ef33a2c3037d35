"""The products of a linear layer under torch without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import cute_ops_torch
from cute_ops import Case, Op, testing
from cute_ops.ops.gemm.linear import PRODUCTS, linear, linear_dweight, linear_dx

sys.path.append(str(Path(__file__).parents[1] / "core" / "kernels"))
from epilogues import OPS as EPILOGUES

every_product = pytest.mark.parametrize("product", PRODUCTS, ids=lambda op: op.name)


def plain(product: Op, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if product is linear_dweight:
        return first.flatten(0, -2).T @ second.flatten(0, -2)
    return first @ (second if product is linear_dx else second.T)


@every_product
@pytest.mark.parametrize("sizes", [(5, 32, 24), (0, 32, 24), (5, 0, 24), (5, 32, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_values(product: Op, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    shapes = [t.of({"m": (2, m), "n": n, "k": k}) for t in product.inputs.values()]
    tensors = [torch.randint(-4, 5, shape).to(torch.bfloat16) for shape in shapes]
    out = cute_ops_torch.register(product)(*tensors)
    exact = plain(product, *(t.double() for t in tensors))
    assert out.shape == exact.shape
    assert torch.equal(out, exact.to(out.dtype))


@every_product
def test_as_an_op_of_torch(product: Op) -> None:
    cute_ops_torch.register(product)
    shapes = [t.of({"m": (3, 5), "n": 16, "k": 8}) for t in product.inputs.values()]
    tensors = [torch.randn(shape).half() for shape in shapes]
    torch.library.opcheck(getattr(torch.ops.cute, product.name).default, tuple(tensors))


def test_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    with pytest.raises(TypeError, match="argument `x` has dtype float32, expected bfloat16 or float16"):
        cute_ops_torch.register(linear)(x, weight)
    with pytest.raises(ValueError, match="argument `weight` has k=7, but k=8"):
        cute_ops_torch.register(linear)(x.half(), weight[:, :7].half())
    with pytest.raises(ValueError, match=r"argument `weight` has strides \(16, 2\), expected 1 in k or n"):
        cute_ops_torch.register(linear)(x.half(), torch.randn(4, 16).half()[:, ::2])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda op: op.name)
def test_epilogues(epilogue: Op) -> None:
    """As ops of torch, with leading dims, and of nothing."""
    function = cute_ops_torch.register(epilogue)
    for sizes in ({"m": (2, 3), "n": 16, "k": 8}, {"m": (), "n": 5, "k": 0}, {"m": (0,), "n": 5, "k": 8}):
        given = testing.inputs(epilogue, Case("", sizes), "float16")
        tensors = {name: torch.from_numpy(a) for name, a in given.items() if a is not None}
        got = function(*tensors.values())
        testing.check(epilogue, tensors, epilogue.attrs, got if isinstance(got, tuple) else (got,))
    torch.library.opcheck(getattr(torch.ops.cute, epilogue.name).default, (*tensors.values(), *epilogue.attrs.values()))
