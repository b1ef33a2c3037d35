"""Parts of a decoder layer as one node of autograd: they keep less and add less than their modules.

A gated MLP written as modules saves the product of gate and up for the gradient of the layer behind it, though it
follows from gate and up, which are saved too; and autograd adds the two gradients of its input in a pass of their own.
Here the backward makes the product again in the pass that it needs anyway, over the memory of its cotangent. Layers of
one input (gate and up; queries, keys and values) are one layer in the backward and, where their weights lie side by
side, in the forward, too. The kernel that turns the gradients of rotated heads back lays them side by side. Where a
norm reads a residual stream that goes on, its backward adds the stream's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_ops_torch import functions
from cute_ops_torch.huggingface.packed_weights import as_one
from cute_ops_torch.library.autograd import _row_major, once, overwriting
from cute_ops_torch.library.register import family

Tensor = torch.Tensor


def silu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x @ gate.T) * (x @ up.T)) @ down.T``, with the weights of three linear layers."""
    return _SiluMLP.apply(x, gate, up, down)  # type: ignore[no-untyped-call, no-any-return]


class _SiluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both = _products(x.reshape(-1, x.shape[-1]), (gate, up))
        out = functions.swiglu(both) @ down.t()
        # Frozen weights need no x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:3]) else None, gate, up, down, both)
        ctx.lead = x.shape[:-1]
        return out.view(*ctx.lead, down.shape[0])

    @staticmethod
    @once("silu_mul in a gated MLP")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, both = ctx.saved_tensors
        dout, ddown = dout.reshape(-1, down.shape[0]), None
        if ctx.needs_input_grad[3]:
            dboth, product = _again(both, dout @ down)
            ddown = dout.t() @ product
            del product
        else:
            dboth = torch.ops.cute.swiglu_bwd(both, dout @ down)
        return *_of_one_layer(ctx, dboth, x, (gate, up)), ddown


def _again(both: Tensor, dproduct: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and product, over the memory of what they are made of, unless another backward is to come."""
    _, run, into = family("cute", "swiglu_again")
    keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    # A thread stores where it has read, but not where vectors of a row's halves overlap its end.
    if not keep and dproduct.shape[-1] * dproduct.itemsize % 16 == 0:
        run = overwriting(run, into, (0, 1))
    return run(both, dproduct)  # type: ignore[no-any-return]


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``x @ w.T`` for each weight: of linear layers that read the same input.

    Gradients of the weights are parts of one tensor where all are wanted.
    """
    return _Projections.apply(x, *weights)  # type: ignore[no-untyped-call, no-any-return]


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        # Frozen weights need no x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, *weights)
        ctx.lead = x.shape[:-1]
        return tuple((rows @ w.t()).view(*x.shape[:-1], w.shape[0]) for w in weights)

    @staticmethod
    @once("layers of one input")
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dout = torch.cat([d.reshape(-1, w.shape[0]) for d, w in zip(douts, weights, strict=True)], -1)
        return _of_one_layer(ctx, dout, x, weights)


def _products(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``rows @ w.T`` for each weight, side by side."""
    one = as_one(weights)
    if one is not None:
        return rows @ one.t()
    out = rows.new_empty(rows.shape[0], sum(w.shape[0] for w in weights))
    for weight, part in zip(weights, out.split([w.shape[0] for w in weights], -1), strict=True):
        torch.mm(rows, weight.t(), out=part)
    return out


def _of_one_layer(ctx: Any, dout: Tensor, x: Tensor | None, weights: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of an input and of the weights that it met, whose outputs' gradients lie side by side.

    As those of one layer: its products take less time than those of each and sums.
    """
    wanted_x, *wanted = ctx.needs_input_grad[: 1 + len(weights)]
    dx = _back(dout, weights).view(*ctx.lead, weights[0].shape[1]) if wanted_x else None
    dweights: list[Tensor | None] = [None] * len(weights)
    if x is not None:
        rows, sizes = x.reshape(-1, x.shape[-1]), [w.shape[0] for w in weights]
        if all(wanted):
            dweights = list((dout.t() @ rows).split(sizes))
        else:
            dweights = [d.t() @ rows if w else None for d, w in zip(dout.split(sizes, -1), wanted, strict=True)]
    return dx, *dweights


def _back(dout: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``sum(d @ w)`` over weights and their columns of ``dout``."""
    one, (first, *others) = as_one(weights), weights
    # To copy weights moves twice their elements, to add to a result twice its own.
    if one is None and sum(w.numel() for w in weights) < dout.shape[0] * first.shape[1] * len(others):
        one = torch.cat(list(weights))
    if one is not None:
        return dout @ one
    start, *rest = dout.split([w.shape[0] for w in weights], -1)
    result = start @ first
    for part, weight in zip(rest, others, strict=True):
        result.addmm_(part, weight)
    return result


def rotated_projections(
    x: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, headdim: int
) -> tuple[Tensor, ...]:
    """``(rope(x @ q.T), rope(x @ k.T), x @ v.T)`` as (..., heads, headdim), for weights ``(q, k, v)``.

    As :func:`projections`; the gradients of the products come side by side from the kernel that turns them back.
    """
    return _RotatedProjections.apply(x, *weights, cos, sin, headdim)  # type: ignore[no-untyped-call, no-any-return]


class _RotatedProjections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *weights, cos, sin, headdim = arguments
        rows = x.reshape(-1, x.shape[-1])
        # Frozen weights need no x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:4]) else None, *weights, cos, sin)
        ctx.lead = x.shape[:-1]
        shape = (*x.shape[:-1], -1, headdim)
        turned = functions.rope(_products(rows, weights[:2]).view(shape), cos, sin)
        q, k = turned.split([w.shape[0] // headdim for w in weights[:2]], -2)
        return q, k, (rows @ weights[2].t()).view(shape)

    @staticmethod
    @once("rope of layers of one input")
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, cos, sin = ctx.saved_tensors
        joined = torch.ops.cute.rope_bwd_joined(*map(_row_major, douts), cos, sin)
        dout = joined.view(-1, joined.shape[-2] * joined.shape[-1])
        return *_of_one_layer(ctx, dout, x, weights), None, None, None


def norm_of_stream(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rmsnorm(x), x)``; the gradients of both come together in one pass."""
    return _NormOfStream.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]


class _NormOfStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return functions.rmsnorm(x, weight, None, eps), x.view_as(x)

    @staticmethod
    @once("rmsnorm of a residual stream")
    def backward(ctx: Any, dout: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if dout is None:
            return dx, None, None
        x, weight = ctx.saved_tensors
        dout, dx = _row_major(dout), None if dx is None else _row_major(dx)
        _, dx, dweight, _ = torch.ops.cute.add_rmsnorm_bwd(x, dout, dx, weight, None, ctx.eps, 0.0)
        return dx, dweight, None
