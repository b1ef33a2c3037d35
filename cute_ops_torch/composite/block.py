"""Parts of a transformer's block: linear layers with the norm of the residual stream before or after them, or with the
rotation of heads after them; and the gated MLP.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ops.composite import gated_mlp as mlp
from cute_ops.composite import linear_add_rmsnorm as add_rmsnorm
from cute_ops.composite import qkv_rope as rotation
from cute_ops.composite import rmsnorm_linear as norm_before
from cute_ops.composite.docstrings import continued
from cute_ops.ops.gemm.by_call import Epilogue, weight_shape
from cute_ops_torch.composite.autocast import autocast
from cute_ops_torch.composite.constant import functions
from cute_ops_torch.composite.linear import call_with_epilogue
from cute_ops_torch.library.tensors import checked

Tensor = torch.Tensor
_linear_add_rmsnorm = functions(add_rmsnorm.linear_add_rmsnorm)
_qkv_rope = functions(rotation.qkv_rope)
_gated_mlp = functions(mlp.gated_mlp)


@checked
@continued(add_rmsnorm.DOC)
def linear_add_rmsnorm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float = 1e-6, *, fused: str = "auto",
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The last layer of a transformer's block, and the norm that comes next."""
    x, weight, residual = autocast(x, weight, residual)
    out: tuple[Tensor, Tensor] = _linear_add_rmsnorm(transposed)(x, weight, residual, norm_weight, eps, fused)
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
    out: Tensor = _qkv_rope(size, transposed)(x, weight, cos, sin, heads, fused)
    return out


@checked
@continued(mlp.DOC)
def gated_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str = "silu", *, fused: str = "auto",
    save: str = "pre", transposed: bool = False, halves: bool = False,
) -> Tensor:  # fmt: skip
    """``out = (activation(x @ gate.T) * (x @ up.T)) @ w_down.T`` with ``gate, up = w_gate_up[:n], w_gate_up[n:]``."""
    x, w_gate_up, w_down = autocast(x, w_gate_up, w_down)
    options = save, transposed, w_gate_up.ndim > 2 and not halves, halves
    out: Tensor = _gated_mlp(*options)(x, w_gate_up, w_down, activation, fused)
    return out
