"""Parts of a decoder layer as one node of autograd: they keep less and add less than their modules.

A gated MLP written as modules saves the product of gate and up for the gradient of the layer behind it, though it
follows from gate and up, which are saved too; and autograd adds the two gradients of its input in a pass of their own.
Here the backward makes the product again in the pass that it needs anyway, over the memory of its cotangent, and the
second matrix product adds to the result of the first. Queries, keys and values are one layer's in the backward. Where a
norm reads a residual stream that goes on, its backward adds the stream's gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ops_torch import functions
from cute_ops_torch.autograd import _row_major, inplace_gradient, once
from cute_ops_torch.registry import family

Tensor = torch.Tensor


def silu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """``(silu(x @ gate.T) * (x @ up.T)) @ down.T``, with the weights of three linear layers."""
    return _SiluMLP.apply(x, gate, up, down)  # type: ignore[no-untyped-call, no-any-return]


class _SiluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        g, u = rows @ gate.t(), rows @ up.t()
        out = functions.silu_mul(g, u) @ down.t()
        # Frozen weights need no x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:3]) else None, gate, up, down, g, u)
        return out.view(*x.shape[:-1], down.shape[0])

    @staticmethod
    @once("silu_mul in a gated MLP")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, g, u = ctx.saved_tensors
        wanted_x, wanted_gate, wanted_up, wanted_down = ctx.needs_input_grad
        lead, dout, ddown = dout.shape[:-1], dout.reshape(-1, down.shape[0]), None
        if wanted_down:
            dg, du, product = _again()(g, u, dout @ down)
            ddown = dout.t() @ product
            del product
        else:
            dg, du = torch.ops.cute.silu_mul_bwd(g, u, dout @ down)
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        dgate = dg.t() @ rows if wanted_gate else None
        dup = du.t() @ rows if wanted_up else None
        dx = (dg @ gate).addmm_(du, up).view(*lead, gate.shape[1]) if wanted_x else None
        return dx, dgate, dup, ddown


def _again() -> Any:
    """Gradients and product, over the memory of what they are made of, unless another backward is to come."""
    op, run, into = family("cute", "silu_mul_again")
    keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
    return run if keep else inplace_gradient(op, run, into)


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
        wanted_x, *wanted = ctx.needs_input_grad
        # Side by side they are the gradient of one layer: its products take less time than three and two sums.
        dout = torch.cat([d.reshape(-1, w.shape[0]) for d, w in zip(douts, weights, strict=True)], -1)
        dx = (dout @ torch.cat(weights)).view(*ctx.lead, weights[0].shape[1]) if wanted_x else None
        dweights: list[Tensor | None] = [None] * len(weights)
        if all(wanted):
            dweights = list((dout.t() @ x.reshape(-1, x.shape[-1])).split([w.shape[0] for w in weights]))
        elif any(wanted):
            rows, parts = x.reshape(-1, x.shape[-1]), dout.split([w.shape[0] for w in weights], -1)
            dweights = [d.t() @ rows if w else None for d, w in zip(parts, wanted, strict=True)]
        return dx, *dweights


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
