"""Matrix products of layers: on a GPU by our ops, which run the faster of our kernel and torch's; else by torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cute_ops.composite import linear_add_rmsnorm, qkv_rope
from cute_ops.composite.gated_mlp import gated_mlp_apart, mlp_ops
from cute_ops_torch import functions, registry
from cute_ops_torch.composite import block
from cute_ops_torch.composite.constant import overloads, traced
from cute_ops_torch.library import framework
from cute_ops_torch.library.inplace import overwriting
from cute_ops_torch.library.products import added_products

Tensor = torch.Tensor
_MLP = mlp_ops(transposed=False)
_gated = registry.define(_MLP.gated_saving).overload
_gated_dgrad = registry.define(_MLP.dgrad).overload
_traced_mlp = traced(gated_mlp_apart)
_linear_add_rmsnorm = overloads(linear_add_rmsnorm.linear_add_rmsnorm)
_gated_dgrad_again = registry.define(_MLP.dgrad_again)


def are_ours(x: Tensor) -> bool:
    """Whether products of ``x`` are computed by our ops."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``."""
    return torch.ops.cute.linear(x, weight) if are_ours(x) else x @ weight.t()


def input_gradient(dout: Tensor, weight: Tensor) -> Tensor:
    """``dout @ weight``."""
    return torch.ops.cute.linear_dx(dout, weight) if are_ours(dout) else dout @ weight


def input_gradients(douts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of ``dout @ weight`` of matrices, each product added to the one before.

    Compilers see one op: of their own graphs each sum would be copied before the next product is added to it.
    """
    if torch.compiler.is_compiling() and len(douts) > 1:
        return torch.ops.cute.input_gradients(douts, weights)  # type: ignore[no-any-return]
    return added_products(douts, weights)


def weight_gradient(dout: Tensor, x: Tensor) -> Tensor:
    """``dout.T @ x``."""
    return torch.ops.cute.linear_dweight(dout, x) if are_ours(dout) else dout.t() @ x


def swiglu(x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """``silu(x @ gate.T) * (x @ up.T)`` of packed weights, and both products side by side."""
    return _gated(x, gate_up, "silu")  # type: ignore[no-any-return]


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x @ gate.T) * (x @ up.T)) @ down.T`` in compiled graphs, whose products read both weights in place where
    these are packed.
    """
    return _traced_mlp(False)(x, gate, up, down, "silu", "auto")  # type: ignore[no-any-return]


def swiglu_input_gradient(dout: Tensor, down: Tensor, products: Tensor) -> Tensor:
    """The gradient of both products, for the gradient ``dout @ down`` of what SwiGLU makes of them."""
    return _gated_dgrad(dout, down, products, "silu")  # type: ignore[no-any-return]


def swiglu_gradient_again(dout: Tensor, down: Tensor, products: Tensor, overwrite: bool) -> tuple[Tensor, Tensor]:
    """The gradient of both products, and what SwiGLU makes of them, recomputed; it may ``overwrite`` the products."""
    run = _gated_dgrad_again.overload
    # A subtile is read and then stored by one CTA. Only vectors of halves of a row that start off a vector overlap.
    if overwrite and products.shape[-1] // 2 * products.itemsize % 16 == 0:
        run = overwriting(run, _gated_dgrad_again.launcher.into, (2, None))
    return run(dout, down, products, "silu", "auto")  # type: ignore[no-any-return]


def add_rmsnorm(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rmsnorm(total), total)`` of ``total = x @ weight.T + residual``."""
    if are_ours(x):
        return _linear_add_rmsnorm()(x, weight, residual, norm_weight, eps)  # type: ignore[no-any-return]
    # Every argument is given, as in `rmsnorm_and_residual`.
    out: tuple[Tensor, Tensor] = functions.add_rmsnorm(x @ weight.t(), residual, norm_weight, None, eps, 0.0)
    return out


def rotates(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, headdim: int) -> bool:
    """Whether heads are rotated inside of the product that makes them."""
    if not are_ours(x) or headdim not in qkv_rope.SIZES:
        return False
    inputs = {"x": x, "weight": weight, "cos": cos, "sin": sin}
    return framework.kernel_is_faster(qkv_rope.qkv_rope(headdim), inputs, {"heads": weight.shape[0] // headdim})


def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, headdim: int) -> Tensor:
    """``x @ weight.T`` as (..., heads, headdim), of which the first ``heads`` are rotated."""
    out: Tensor = _qkv_rope(headdim)(x, weight, cos, sin, heads)
    return out.view(*x.shape[:-1], -1, headdim)


def heads(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Queries and keys, rotated, and values as (..., heads, headdim), in compiled graphs: so many of one product."""
    out = block.qkv_rope(x, weight, cos, sin, sum(counts[:-1])).unflatten(-1, (-1, 2 * cos.shape[-1]))
    return torch.split(out, list(counts), -2)


@cache
def _qkv_rope(headdim: int) -> Any:
    return registry.define(qkv_rope.qkv_rope(headdim)).overload
