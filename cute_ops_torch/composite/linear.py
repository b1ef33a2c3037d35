"""A linear layer with an epilogue: :mod:`cute_ops.ops.gemm.by_call`."""

from __future__ import annotations

from typing import Any

import torch

from cute_ops.composite.docstrings import continued
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Attrs, Epilogue, Fit, Shapes
from cute_ops.ops.gemm.linear import linear as product
from cute_ops_torch.composite.autocast import autocast
from cute_ops_torch.composite.constant import constant
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
        return _product(x, weight.mT if transposed else weight, fused)
    fits = by_call.fits(epilogue, (x, weight, *operands), packed, transposed, array)
    shapes, layout = tuple(fit and fit.shape for fit in fits), by_call.weight_shape(packed, transposed)
    given = [_fitted(t, fit) for t, fit in zip(operands, fits, strict=True) if t is not None and fit is not None]
    if torch.compiler.is_dynamo_compiling():
        name = _defined(epilogue, shapes, layout, save, tuple(attrs.items()))
        return getattr(torch.ops.cute, name).default(x, weight, *given, fused=fused)
    op = by_call.op_of(epilogue, shapes, layout, save, tuple(attrs.items()))
    return define(op).function(x, weight, *given, fused=fused)


@constant
def _defined(epilogue: Epilogue, shapes: Shapes, weight: str, save: str, attrs: Attrs) -> str:
    """The name of the op, which is registered."""
    op = by_call.op_of(epilogue, shapes, weight, save, attrs)
    define(op)
    return op.name


def _fitted(tensor: Tensor, fit: Fit) -> Tensor:
    if tensor.ndim > len(fit.sizes):
        return tensor.reshape(fit.sizes)
    # Tiles that some rows share are copied: kernels step from row to row by one stride.
    return tensor if tensor.shape == fit.sizes else tensor.expand(fit.sizes).contiguous()
