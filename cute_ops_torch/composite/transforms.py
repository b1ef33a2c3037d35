"""``linear_cross_entropy`` inside ``torch.func.grad`` and other transforms.

Each level of a transform differentiates the gradient again, so gradients must be functions of their own inputs. These
nodes are autograd Functions that torch itself carries from level to level, over the same ops as outside. A second
derivative raises: without that it would be zero. ``vmap`` runs the examples one by one, because the weight's gradient
is a sum over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_ops_torch.library.vmap import examples, stacked

Tensor = torch.Tensor


def active(tensors: Sequence[Tensor | None]) -> bool:
    """Whether to use the nodes of this module; the op refuses forward-mode tangents, which they do not take."""
    transforms = torch._C._are_functorch_transforms_active()
    return transforms and forward_ad._current_level < 0 and differentiated(tensors)


def differentiated(tensors: Sequence[Tensor | None]) -> bool:
    """Whether ``torch.func.grad`` or a transform like it tracks one of the tensors."""
    return any(t is not None and torch._C._functorch.is_gradtrackingtensor(t) for t in tensors)


def step(*arguments: Any) -> tuple[Tensor, ...]:
    """``linear_cross_entropy_step``: a sum or mean of the losses, and its gradients."""
    return _Step.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]


def rows(*arguments: Any) -> tuple[Tensor, ...]:
    """``linear_cross_entropy_rows``: loss of each row, and the two parts of its log-sum-exp."""
    return Rows.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]


class _Node(torch.autograd.Function):
    """A Function that ``vmap`` runs once for each example."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        each = [cls.apply(*example) for example in examples(info.batch_size, in_dims, arguments)]  # type: ignore[no-untyped-call]
        columns = list(zip(*each, strict=True))
        return tuple(stacked(info.batch_size, column) for column in columns), (0,) * len(columns)


class _Step(_Node):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.cute.linear_cross_entropy_step(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.wanted, ctx.rest = inputs[9], len(inputs) - 4
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        if any(d is not None for d in others):
            raise _no_double_backward()
        found = [
            (gradient.float() * dloss).to(gradient.dtype) if wanted and dloss is not None else None
            for gradient, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        ]
        return found[0], found[1], None, found[2], *[None] * ctx.rest


class Rows(_Node):
    """Outside of transforms, torch's dispatcher makes a node of these functions, of all arguments of the op."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.cute.linear_cross_entropy_rows(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, target, bias = inputs[:4]
        ctx.attrs, ctx.own, ctx.rest = inputs[4:8], inputs[8:], len(inputs) - 4
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(bias, hidden, weight, target, *output[1:])

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dloss is None:
            return tuple([None] * (4 + ctx.rest))
        needed, (bias, *saved) = ctx.needs_input_grad, ctx.saved_tensors
        wanted = [needed[0], needed[1], needed[3]]
        found = RowsGradient.apply(*saved, dloss.contiguous(), bias, *ctx.attrs, wanted, *ctx.own)  # type: ignore[no-untyped-call]
        dhidden, dweight, dbias = (g if w else None for g, w in zip(found, wanted, strict=True))
        return dhidden, dweight, None, dbias, *[None] * ctx.rest


class RowsGradient(_Node):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.cute.linear_cross_entropy_rows_bwd(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _no_double_backward()


def _no_double_backward() -> NotImplementedError:
    return NotImplementedError(
        "cute.linear_cross_entropy: its gradient has none of its own, so there is no double backward."
    )
