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
from cute_ops_torch.composite.autocast import autocast
from cute_ops_torch.composite.constant import constant
from cute_ops_torch.registry import define

Tensor = torch.Tensor
MADE_BY: dict[str, Callable[[], Op]] = {
    "linear_add_rmsnorm": add_rmsnorm.linear_add_rmsnorm,
    **{f"qkv_rope_{size}": partial(rotation.qkv_rope, size) for size in rotation.SIZES},
    **{
        norm_before.name_of(epilogue, biased): partial(norm_before.rmsnorm_linear, epilogue, biased)
        for epilogue in norm_before.KINDS
        for biased in (False, True)
    },
}


@continued(add_rmsnorm.DOC)
def linear_add_rmsnorm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float = 1e-6, *, fused: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The last layer of a transformer's block, and the norm that comes next."""
    x, weight, residual = autocast(x, weight, residual)
    out: tuple[Tensor, Tensor] = _function("linear_add_rmsnorm")(x, weight, residual, norm_weight, eps, fused)
    return out


@continued(norm_before.DOC)
def rmsnorm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6,
    *, epilogue: str = "bias", fused: str = "auto",
) -> Tensor:  # fmt: skip
    """The norm before a linear layer, and the layer."""
    name = norm_before.name_of(epilogue, bias is not None)
    x, weight = autocast(x, weight)
    given = (x, weight) if bias is None else (x, weight, bias)
    out: Tensor = _function(name)(*given, norm_weight, eps, fused)
    return out


@continued(rotation.DOC)
def qkv_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, *, fused: str = "auto") -> Tensor:
    """The projection to queries, keys and values, and the rotary embedding of queries and keys."""
    size = rotation.head_size(tuple(cos.shape))
    x, weight = autocast(x, weight)
    out: Tensor = _function(f"qkv_rope_{size}")(x, weight, cos, sin, heads, fused)
    return out


def _function(name: str) -> Any:
    """The function of the op of this name, which is registered if it was not."""
    if torch.compiler.is_dynamo_compiling():
        return getattr(torch.ops.cute, _defined(name)).default
    return define(MADE_BY[name]()).function


@constant
def _defined(name: str) -> str:
    """The name of the op, which is registered."""
    define(MADE_BY[name]())
    return name
