"""Parts of a decoder layer as one autograd node each, which save less memory and add fewer gradients.

A gated MLP written as modules saves ``silu(gate) * up`` for the backward of the down projection, although gate and up
are saved too. Here the backward kernel that reads those computes it again, in the memory of its cotangent. Linear
layers that read the same input (gate and up; queries, keys and values) are one layer in the backward, so that autograd
adds no gradients of that input; with packed weights in the forward, too. The kernel that rotates the gradients of
queries and keys back writes them beside those of the values. The backward of a norm adds the gradient of the residual
stream that it reads. On a GPU where our products are faster, their epilogues compute the activation of a gated MLP with
packed weights, and its gradient; the rotation of queries and keys; the add to the residual stream, and the sum of
squares for the norm that reads it next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_ops.ops.norm.add_rmsnorm import add_rmsnorm_bwd
from cute_ops_torch import functions, registry
from cute_ops_torch.huggingface import products
from cute_ops_torch.huggingface.bypass import is_exporting
from cute_ops_torch.library.inplace import overwriting
from cute_ops_torch.library.no_gradient import link_inputs, once
from cute_ops_torch.library.packed import packed_view
from cute_ops_torch.library.tensors import row_major

Tensor = torch.Tensor


def silu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x @ gate.T) * (x @ up.T)) @ down.T``, with the weights of three linear layers."""
    return _SiluMLP.apply(x, gate, up, down)  # type: ignore[no-untyped-call, no-any-return]


class _SiluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        product, gate_up = _swiglu(x, gate, up)
        # The gradient of a weight needs x.
        needs_x = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(x if needs_x else None, gate, up, down, gate_up)
        if not needs_x:
            link_inputs(ctx, x)
        ctx.lead = x.shape[:-1]
        return products.forward(product, down).view(*ctx.lead, down.shape[0])

    @staticmethod
    @once("silu_mul in a gated MLP")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _silu_mlp_bwd(ctx, dout, ctx.saved_tensors)


def silu_mlp_add_rmsnorm(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor, norm: Any
) -> tuple[Tensor, Tensor]:
    """``(norm(total), total)`` of ``total = silu_mlp(x, gate, up, down) + residual``, for the RMSNorm of a model."""
    return _SiluMLPAddRMSNorm.apply(x, gate, up, down, residual, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call, no-any-return]


class _SiluMLPAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        product, gate_up = _swiglu(x, gate, up)
        ctx.lead, ctx.eps = x.shape[:-1], eps
        normed, total = products.add_rmsnorm(product.view(*ctx.lead, -1), down, residual, norm_weight, eps)
        # The gradient of a weight needs x.
        x_or_none = x if any(ctx.needs_input_grad[1:3]) else None
        ctx.save_for_backward(x_or_none, gate, up, down, gate_up, total, norm_weight)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @once("silu_mul in a gated MLP")
    def backward(ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        *mlp, total, norm_weight = ctx.saved_tensors
        dresidual, dnorm_weight = _stream_bwd(ctx, total, norm_weight, dnormed, dtotal, ctx.needs_input_grad[5])
        return *_silu_mlp_bwd(ctx, dresidual, mlp), dresidual, dnorm_weight, None


def _swiglu(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """``silu(x @ gate.T) * (x @ up.T)``, and both products side by side, as matrices."""
    rows, packed = x.reshape(-1, x.shape[-1]), packed_view((gate, up))
    if packed is not None and products.are_ours(rows):
        return products.swiglu(rows, packed)
    gate_up = _project(rows, (gate, up))
    return functions.swiglu(gate_up), gate_up


def _silu_mlp_bwd(ctx: Any, dout: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of x, gate, up and down, which come first in ``ctx``; ``saved``: x or None, these weights, and the
    products with gate and up.
    """
    x, gate, up, down, gate_up = saved
    dout, ddown = dout.reshape(-1, down.shape[0]), None
    if ctx.needs_input_grad[3]:
        dgate_up, product = _swiglu_gradient_again(dout, down, gate_up)
        ddown = products.weight_gradient(dout, product)
        del product
    elif products.are_ours(dout):
        dgate_up = products.swiglu_input_gradient(dout, down, gate_up)
    else:
        dgate_up = torch.ops.cute.swiglu_bwd(gate_up, dout @ down)
    return *_linear_bwd(ctx, dgate_up, x, (gate, up)), ddown


def _swiglu_gradient_again(dout: Tensor, down: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, in their memory unless another backward needs them, and ``silu(gate) * up``."""
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if products.are_ours(dout):
        return products.swiglu_gradient_again(dout, down, gate_up, overwrite=not keep)
    dproduct = dout @ down
    _, run, into = registry.family("cute", "swiglu_again")
    # A thread stores only where it has read, except that the vectors of unaligned halves of a row overlap.
    if not keep and dproduct.shape[-1] * dproduct.itemsize % 16 == 0:
        run = overwriting(run, into, (0, 1))
    return run(gate_up, dproduct)  # type: ignore[no-any-return]


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``x @ w.T`` for each weight: linear layers that read the same input."""
    return _Projections.apply(x, *weights)  # type: ignore[no-untyped-call, no-any-return]


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        # The gradient of a weight needs x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, *weights)
        ctx.lead = x.shape[:-1]
        return tuple(products.forward(rows, w).view(*ctx.lead, w.shape[0]) for w in weights)

    @staticmethod
    @once("layers of one input")
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dout = torch.cat([d.reshape(-1, w.shape[0]) for d, w in zip(douts, weights, strict=True)], -1)
        return _linear_bwd(ctx, dout, x, weights)


def rotated_projections(
    x: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, headdim: int, together: bool
) -> tuple[Tensor, ...]:
    """``(rope(x @ q.T), rope(x @ k.T), x @ v.T)`` as (..., heads, headdim), for weights ``(q, k, v)``.

    Args:
        together: whether all three may be views of one array, whose memory lives as long as any of them.
    """
    return _RotatedProjections.apply(x, *weights, cos, sin, headdim, together)  # type: ignore[no-untyped-call, no-any-return]


class _RotatedProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *weights, cos, sin, headdim, together = arguments
        rows = x.reshape(-1, x.shape[-1])
        # The gradient of a weight needs x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:4]) else None, *weights, cos, sin)
        ctx.lead = x.shape[:-1]
        return _rotated(rows.view(x.shape), weights, cos, sin, headdim, together)

    @staticmethod
    @once("rope of layers of one input")
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, cos, sin = ctx.saved_tensors
        dout = torch.ops.cute.rope_bwd_joined(*map(row_major, douts), cos, sin).flatten(-2)
        return *_linear_bwd(ctx, dout.view(-1, dout.shape[-1]), x, weights), None, None, None, None


def rotated_heads(x: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, headdim: int) -> tuple[Tensor, ...]:
    """:func:`rotated_projections` in compiled graphs, of one product. Its parts have one gradient: autograd would join
    theirs by a copy.
    """
    weight, counts = torch.cat(list(weights)), [w.shape[0] // headdim for w in weights]
    if is_exporting():
        return products.heads(x, weight, cos, sin, counts)
    return _RotatedHeads.apply(x, weight, cos, sin, counts)  # type: ignore[no-untyped-call, no-any-return]


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, ...]:
        # The gradient of the weight needs x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, cos, sin)
        ctx.lead = x.shape[:-1]
        return products.heads(x, weight, cos, sin, counts)

    @staticmethod
    @once("rope of layers of one input")
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        dout = torch.ops.cute.rope_bwd_joined(*map(row_major, douts), cos, sin).flatten(-2)
        return *_linear_bwd(ctx, dout.view(-1, dout.shape[-1]), x, (weight,)), None, None, None


def _rotated(
    x: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, headdim: int, together: bool
) -> tuple[Tensor, ...]:
    """``x @ w.T`` for each weight as (..., heads, headdim), but for the last one rotated."""
    heads, rows, shape = [w.shape[0] // headdim for w in weights], x.view(-1, x.shape[-1]), (*x.shape[:-1], -1, headdim)
    every = packed_view(weights) if together else None
    packed = packed_view(weights[:-1]) if every is None else every
    turned = weights[:-1] if packed is None else [packed]
    if all(products.rotates(x, w, cos, sin, headdim) for w in turned):
        counts = [min(w.shape[0] // headdim, sum(heads[:-1])) for w in turned]
        made = [products.rotated(x, w, cos, sin, n, headdim) for w, n in zip(turned, counts, strict=True)]
        if every is not None:
            return torch.split(made[0], heads, -2)
    else:
        made = [functions.rope(_project(rows, weights[:-1]).view(shape), cos, sin)]
    q, k = made if len(made) == 2 else torch.split(made[0], heads[:-1], -2)
    return q, k, products.forward(rows, weights[-1]).view(shape)


def _project(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``rows @ w.T`` for each weight, concatenated along the columns."""
    packed = packed_view(weights)
    if packed is not None:
        return products.forward(rows, packed)
    out = rows.new_empty(rows.shape[0], sum(w.shape[0] for w in weights))
    for weight, columns in zip(weights, torch.split(out, [w.shape[0] for w in weights], -1), strict=True):
        torch.mm(rows, weight.t(), out=columns)
    return out


def _linear_bwd(ctx: Any, dout: Tensor, x: Tensor | None, weights: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of the input and the weights of linear layers that read the same input, for the gradients of their
    outputs side by side. They come first in ``ctx``, which has the input's leading dims, ``lead``.
    """
    needs_dx, *needs_dw = ctx.needs_input_grad[: 1 + len(weights)]
    dx = _input_gradient(dout, weights).view(*ctx.lead, weights[0].shape[1]) if needs_dx else None
    dweights: list[Tensor | None] = [None] * len(weights)
    if x is not None:
        rows, sizes = x.reshape(-1, x.shape[-1]), [w.shape[0] for w in weights]
        if all(needs_dw):  # one product, faster than one for each weight
            dweights = list(torch.split(products.weight_gradient(dout, rows), sizes))
        else:
            douts = torch.split(dout, sizes, -1)
            dweights = [
                products.weight_gradient(d, rows) if needed else None for d, needed in zip(douts, needs_dw, strict=True)
            ]
    return dx, *dweights


def _input_gradient(dout: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``sum(d @ w)`` over weights and their columns ``d`` of ``dout``."""
    packed, (first, *others) = packed_view(weights), weights
    # Concatenating the weights moves twice their elements, adding a product to the result twice the result's.
    if packed is None and sum(w.numel() for w in weights) < dout.shape[0] * first.shape[1] * len(others):
        packed = torch.cat(list(weights))
    if packed is not None:
        return products.input_gradient(dout, packed)
    start, *rest = torch.split(dout, [w.shape[0] for w in weights], -1)
    result = start @ first
    for columns, weight in zip(rest, others, strict=True):
        result.addmm_(columns, weight)
    return result


# The backward with a weight that is frozen.
_without_weight = registry.define(add_rmsnorm_bwd.only()).overload


def rmsnorm_and_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rmsnorm(x), x)``; the backward adds the gradients of both in one pass."""
    return _RMSNormAndResidual.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]


class _RMSNormAndResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        # Every argument is given: Dynamo ends in an error where a graph of all lengths has a default number here.
        return functions.rmsnorm(x, weight, None, eps, 0.0), x.view_as(x)

    @staticmethod
    @once("rmsnorm of a residual stream")
    def backward(ctx: Any, dout: Tensor | None, dresidual: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_stream_bwd(ctx, x, weight, dout, dresidual, ctx.needs_input_grad[1]), None


def linear_add_rmsnorm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(rmsnorm(total), total)`` of ``total = x @ weight.T + residual``."""
    return _LinearAddRMSNorm.apply(x, weight, residual, norm_weight, eps)  # type: ignore[no-untyped-call, no-any-return]


class _LinearAddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, total = products.add_rmsnorm(x, weight, residual, norm_weight, eps)
        # The gradient of the weight needs x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, total, norm_weight)
        ctx.lead, ctx.eps = x.shape[:-1], eps
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @once("add_rmsnorm after a linear layer")
    def backward(ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, total, norm_weight = ctx.saved_tensors
        dresidual, dnorm_weight = _stream_bwd(ctx, total, norm_weight, dnormed, dtotal, ctx.needs_input_grad[3])
        dout = dresidual.reshape(-1, weight.shape[0])
        return *_linear_bwd(ctx, dout, x, (weight,)), dresidual, dnorm_weight, None


def _stream_bwd(
    ctx: Any, stream: Tensor, weight: Tensor, dnormed: Tensor | None, dstream: Tensor | None, needs_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a residual stream and of the weight of a norm that reads it, where the stream goes on; one of the
    gradients of the norm's output and of that stream may be None.
    """
    if dnormed is None:
        assert dstream is not None  # `once` answers a call without gradients
        return dstream, None
    dout, dresidual = row_major(dnormed), None if dstream is None else row_major(dstream)
    given = stream, dout, dresidual, weight, None, ctx.eps, 0.0
    if not needs_dweight:
        return _without_weight(*given)[1], None
    _, dx, dweight, _ = torch.ops.cute.add_rmsnorm_bwd(*given)
    return dx, dweight
