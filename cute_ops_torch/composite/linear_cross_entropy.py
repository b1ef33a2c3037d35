"""Cross entropy of a linear layer's output that never holds all logits.

The forward computes the gradients chunk by chunk, and the backward scales them (:mod:`cute_ops_torch.composite.
chunked_loss`). Calls that nothing observes skip the dispatcher, and scale their gradients in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_ops.composite.docstrings import continued
from cute_ops.composite.linear_cross_entropy import DOC, check_chunk_rows
from cute_ops_torch.composite import chunked_loss, transforms
from cute_ops_torch.composite.gradient_scale import scale, scale_
from cute_ops_torch.composite.loss_ops import check_call, computes_gradients, needs_gradients, reduced_loss
from cute_ops_torch.host.modes import EXACT, modes_active
from cute_ops_torch.library.no_gradient import once

Tensor = torch.Tensor


@continued(DOC)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy`.

    Deterministic where the framework's matrix products are. ``chunk_rows`` is a hint, for training without
    ``torch.compile``: None takes the fewest rows that cost little time; more rows, up to about 4096, are faster.

    Memory, beyond inputs and gradients, at 16384 x 2048 x 128256 in bfloat16: 1.05 GB for the weight's gradient in
    float32; the logits of a chunk of 2048 rows lie in the memory of its bfloat16 result. With
    ``accum_dtype=torch.bfloat16``: 0.13 GB.
    """
    tensors = hidden, weight, target, bias
    attrs = ignore_index, label_smoothing, z_loss
    check_chunk_rows("linear_cross_entropy", chunk_rows)
    if not torch.compiler.is_compiling() and transforms.active(tensors):
        check_call(tensors, attrs, reduction, accum_dtype)
        return reduced_loss(transforms.step, transforms.rows, tensors, (*attrs, accum_dtype), reduction)
    wanted = needs_gradients(hidden, weight, bias)
    if (
        torch.compiler.is_compiling()
        or modes_active()
        or any(type(t) not in EXACT for t in tensors if t is not None)
        or not computes_gradients(hidden, reduction, wanted)
    ):
        return torch.ops.cute.linear_cross_entropy(*tensors, *attrs, reduction, accum_dtype)  # type: ignore[no-any-return]
    check_call(tensors, attrs, reduction, accum_dtype)
    return _EagerLoss.apply(chunk_rows, wanted, *tensors, *attrs, accum_dtype, reduction)  # type: ignore[no-untyped-call, no-any-return]


class _EagerLoss(torch.autograd.Function):
    """``linear_cross_entropy_step`` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, chunk_rows: int | None, wanted: list[bool], *arguments: Any) -> Tensor:
        step: Callable[..., tuple[Tensor, ...]] = chunked_loss.step
        loss, *gradients = step(*arguments, wanted, chunk_rows=chunk_rows)
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once("linear_cross_entropy")
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # In place, without a second buffer of the weight's size, unless another backward is to come.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        multiply = scale if keep else scale_
        found = (multiply(g, dloss) if w else None for g, w in zip(ctx.saved_tensors, ctx.wanted, strict=True))
        dhidden, dweight, dbias = found
        return None, None, dhidden, dweight, None, dbias, *[None] * 5
