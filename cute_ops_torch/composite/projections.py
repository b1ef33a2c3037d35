"""Linear layers with what a transformer does next: the norm of the residual stream, the rotation of heads; or with
what it does before, that norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cute_ops.composite import linear_add_rmsnorm as add_rmsnorm
from cute_ops.composite import qkv_rope as rotation
from cute_ops.composite import rmsnorm_linear as norm_before
from cute_ops.composite.docstrings import continued
from cute_ops.op import Op
from cute_ops.ops.gemm.by_call import Epilogue, weight_shape
from cute_ops_torch.composite.autocast import autocast
from cute_ops_torch.composite.constant import traced
from cute_ops_torch.composite.linear import call_with_epilogue
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import define

Tensor = torch.Tensor
SUFFIXES = (("", False), ("_kn", True))  # of names, of weights [n, k] and [k, n]
MADE_BY: dict[str, Callable[[], Op]] = {
    **{
        f"linear{suffix}_add_rmsnorm": partial(add_rmsnorm.linear_add_rmsnorm, transposed)
        for suffix, transposed in SUFFIXES
    },
    **{
        f"qkv_rope_{size}{suffix}": partial(rotation.qkv_rope, size, transposed)
        for size in rotation.SIZES
        for suffix, transposed in SUFFIXES
    },
}


@checked
@continued(add_rmsnorm.DOC)
def linear_add_rmsnorm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float = 1e-6, *, fused: str = "auto",
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The last layer of a transformer's block, and the norm that comes next."""
    x, weight, residual = autocast(x, weight, residual)
    function = _function(f"linear{'_kn' if transposed else ''}_add_rmsnorm")
    out: tuple[Tensor, Tensor] = function(x, weight, residual, norm_weight, eps, fused)
    return out


@checked
@continued(norm_before.DOC)
def rmsnorm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, *operands: Tensor | None, eps: float = 1e-6,
    epilogue: Epilogue = "bias", fused: str = "auto", packed: bool = False, transposed: bool = False,
    halves: bool = False, save: str = "pre", **attrs: Any,
) -> Any:  # fmt: skip
    """The norm before a linear layer, the layer, and what happens to its product before that is stored."""
    x, weight = autocast(x, weight)
    layout = weight_shape(packed, transposed, halves, "rmsnorm_linear")
    function, given = call_with_epilogue("rmsnorm_linear", epilogue, (x, weight, *operands), layout, save, attrs)
    return function(x, weight, *given, norm_weight, eps, fused)


@checked
@continued(rotation.DOC)
def qkv_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, *, fused: str = "auto", transposed: bool = False
) -> Tensor:
    """The projection to queries, keys and values, and the rotary embedding of queries and keys."""
    size = rotation.head_size(tuple(cos.shape))
    x, weight = autocast(x, weight)
    out: Tensor = _function(f"qkv_rope_{size}{'_kn' if transposed else ''}")(x, weight, cos, sin, heads, fused)
    return out


def _function(name: str) -> Any:
    """The function of the op of this name, which is registered if it was not."""
    if torch.compiler.is_dynamo_compiling():
        return _traced(name)
    return define(MADE_BY[name]()).function


_traced = traced(lambda name: MADE_BY[name]())
