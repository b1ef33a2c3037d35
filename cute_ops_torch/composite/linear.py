"""A linear layer with an epilogue: :mod:`cute_ops.ops.gemm.by_call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from cute_ops.composite.docstrings import continued
from cute_ops.op import Op
from cute_ops.ops.broadcast import Fit
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Attrs, Epilogue, Shapes
from cute_ops.ops.gemm.linear import linear as product
from cute_ops_torch.composite.autocast import autocast
from cute_ops_torch.composite.constant import constant, number
from cute_ops_torch.library.tensors import array
from cute_ops_torch.registry import define

Tensor = torch.Tensor
_product = define(product).function


@continued(by_call.DOC)
def linear(
    x: Tensor, weight: Tensor, *operands: Tensor | None, epilogue: Epilogue | None = None, fused: str = "auto",
    packed: bool = False, transposed: bool = False, save: str = "pre", **attrs: Any,
) -> Any:  # fmt: skip
    """A product and what happens to it before it is stored: ``out = epilogue(x @ weight.T, *operands)``.

    The op is ``torch.ops.cute.linear_<function>_<digest>``, the same in every process that has made this call.
    """
    x, weight = autocast(x, weight)
    if epilogue is None:
        by_call.without_epilogue(operands, attrs)
        run = _product if weight.ndim <= 2 else _batched_product()
        return run(x, weight.mT if transposed else weight, fused)
    if torch.compiler.is_dynamo_compiling():
        attrs = {name: number(value) for name, value in attrs.items()}
    options = packed, transposed, save, tuple(attrs.items())
    if torch.compiler.is_dynamo_compiling():
        fits = by_call.fits(epilogue, (x, weight, *operands), packed, transposed, array)
        name = _defined(epilogue, tuple(fit and fit.shape for fit in fits), weight.ndim > 2, *options)
        function = getattr(torch.ops.cute, name).default
    else:
        try:
            function, fits = _known(
                epilogue, tuple(t if t is None else t.shape for t in (x, weight, *operands)), *options
            )
        except (TypeError, ValueError):  # it is refused, or a symbolic shape has no hash
            function, fits = _choose(epilogue, (x, weight, *operands), *options)
    given = [_fitted(t, fit) for t, fit in zip(operands, fits, strict=True) if t is not None and fit is not None]
    return function(x, weight, *given, fused=fused)


def _choose(
    epilogue: Epilogue, arrays: Sequence[Tensor | None], packed: bool, transposed: bool, save: str, attrs: Attrs
) -> tuple[Callable[..., Any], tuple[Fit | None, ...]]:
    """The function of a call's op, and how operands meet the product."""
    fits = by_call.fits(epilogue, arrays, packed, transposed, array)
    shapes = tuple(fit and fit.shape for fit in fits)
    batched = arrays[1] is not None and arrays[1].ndim > 2
    op = _op(epilogue, shapes, batched, packed, transposed, save, attrs)
    return define(op).function, fits


@lru_cache(1024)
def _known(epilogue: Epilogue, shapes: tuple[torch.Size | None, ...], *options: Any) -> Any:
    """The same, found again: a call costs little more than that of its op."""
    return _choose(epilogue, [s if s is None else torch.empty(s, device="meta") for s in shapes], *options)


@constant
def _defined(epilogue: Epilogue, shapes: Shapes, *options: Any) -> str:
    """The name of the op, which is registered."""
    op = _op(epilogue, shapes, *options)
    define(op)
    return op.name


def _batched_product() -> Callable[..., Any]:
    if torch.compiler.is_dynamo_compiling():
        return getattr(torch.ops.cute, _defined_batched()).default  # type: ignore[no-any-return]
    return define(_batched()).function


@constant
def _defined_batched() -> str:
    define(_batched())
    return _batched().name


def _batched() -> Op:
    assert product.batched is not None
    return product.batched


def _op(
    epilogue: Epilogue, shapes: Shapes, batched: bool, packed: bool, transposed: bool, save: str, attrs: Attrs
) -> Op:
    make = by_call.op_of_batch if batched else by_call.op_of
    return make(epilogue, shapes, by_call.weight_shape(packed, transposed), save, attrs)


def _fitted(tensor: Tensor, fit: Fit) -> Tensor:
    if tensor.shape == fit.sizes:
        return tensor
    # Tiles that some rows share are copied: kernels step from row to row by one stride.
    return tensor.reshape(fit.own).expand(fit.sizes).contiguous()
