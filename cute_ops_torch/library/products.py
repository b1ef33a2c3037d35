"""The framework's products as functions of their operands: what calls run that no kernel of ours is faster for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cute_ops.declaration.program import ProductPlan
from cute_ops.declaration.shapes import Array
from cute_ops.ops.gemm.linear import multiply
from cute_ops_torch.library import framework
from cute_ops_torch.library.reference import register_fake

Tensor = torch.Tensor
Call = Callable[..., Any]
autocast = torch._C._is_any_autocast_enabled
_linear, _matmul, _mm = torch._C._nn.linear, torch.matmul, torch.mm


def multiplier(product: ProductPlan, a: Array, b: Array) -> Call:
    """``multiply(a, b)`` for operands like these: a new tensor, compact. It is a function of torch, or one in few lines
    around it: at few rows it is shorter than the host's time to get there.
    """
    dtype, transposed = product.dtype, product.transposed
    if dtype not in (None, a.dtype):
        return partial(multiply, framework, product)
    if transposed == 1:
        return _linear if len(b.shape) == 2 else lambda a, b: _matmul(a, b.mT)
    if transposed is None:
        return _matmul
    if product.flat and len(a.shape) != 2:
        return lambda a, b: _mm(a.reshape(-1, a.shape[-1]).t(), b.reshape(-1, b.shape[-1]))
    return lambda a, b: _matmul(a.mT, b)


def adds_bias(product: ProductPlan, a: Array, bias: Array | None) -> bool:
    """Whether ``multiply(a, b, bias)`` of :func:`multiplier` adds it, too."""
    return product.transposed == 1 and product.dtype is None and bias is not None and bias.dtype == a.dtype


def multiplies_into(product: ProductPlan, a: Array, b: Array, biased: bool) -> Call | None:
    """``multiply(a, b[, bias], out)`` writes the product to a tensor; None where that takes a copy."""
    batch = len(b.shape) != 2 and not product.flat
    if batch or product.dtype not in (None, a.dtype):
        return None
    first, second = product.transposed == 0, product.transposed == 1

    def matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _rows(a), _rows(b)
        return a.t() if first else a, b.t() if second else b

    if biased:
        return lambda a, b, bias, out: torch.addmm(bias, *matrices(a, b), out=_rows(out))
    return lambda a, b, out: _mm(*matrices(a, b), out=_rows(out))


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


def writing(into: Call, copying: Call) -> Call:
    """``into`` as what fills outputs that are given; ``copying`` where torch cannot write to them."""

    def call(*args: Any) -> tuple[Any, ...]:
        # Torch's functions with outputs have no gradient, and rows with gaps are no matrix.
        if torch.is_grad_enabled() or not (args[-1].ndim == 2 or args[-1].is_contiguous()):
            copied: tuple[Any, ...] = copying(*args)
            return copied
        into(*args)
        return ()

    return call


def added_products(douts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of ``dout @ weight``, each product added to the one before in place; the first may be ours."""
    first, weight = douts[0], weights[0]
    ours = first.is_cuda and first.dtype in (torch.bfloat16, torch.float16)
    total: Tensor = torch.ops.cute.linear_dx(first, weight) if ours else first @ weight
    for dout, each in zip(douts[1:], weights[1:], strict=True):
        total.addmm_(dout, each)
    return total


_library = torch.library.Library("cute", "FRAGMENT")
_library.define(
    "input_gradients(Tensor[] douts, Tensor[] weights) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.impl("input_gradients", added_products, "CompositeExplicitAutograd")
register_fake(
    _library,
    "input_gradients",
    lambda douts, weights: douts[0].new_empty(douts[0].shape[0], weights[0].shape[1]),
)


def without_autocast(function: Call) -> Call:
    """A function that runs outside of autocast: a declaration says which dtypes there are."""

    def run(*given: Any) -> Any:
        if autocast():
            with torch._C._DisableAutocast():
                return function(*given)
        return function(*given)

    return run
