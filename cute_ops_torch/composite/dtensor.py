"""``linear_cross_entropy`` of DTensors: each rank runs the op on its parts.

Importing ``torch.distributed.tensor`` imports this, once ``cute_ops_torch`` is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from cute_ops_torch.composite import loss_ops
from cute_ops_torch.distributed.dtensor import CallPlacements, add_rule
from cute_ops_torch.distributed.split import Slice

Tensor = torch.Tensor
_DIFFERENTIABLE = ("hidden", "weight", "bias")


def _rows(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *attrs: Any) -> Any:
    tensors = (hidden, weight, target, bias)
    placed = CallPlacements(loss_ops.ROWS, tensors, (), _DIFFERENTIABLE)
    raw = torch.ops.cute.linear_cross_entropy_rows(*placed.local_inputs(tensors), *attrs, **_slice_of(placed))
    return placed.wrap_outputs(raw)


def _rows_bwd(*arguments: Any) -> Any:
    tensors, attrs, wanted = arguments[:7], arguments[7:-1], arguments[-1]
    placed = CallPlacements(loss_ops.ROWS_BWD, tensors, (), _DIFFERENTIABLE, wanted)
    op = torch.ops.cute.linear_cross_entropy_rows_bwd
    return placed.wrap_outputs(op(*placed.local_inputs(tensors), *attrs, wanted, **_slice_of(placed)))


def _step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, accum_dtype: Any, reduction: str, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    tensors = (hidden, weight, target, bias)
    placed = CallPlacements(loss_ops.STEP, tensors, (), _DIFFERENTIABLE, wanted)
    count = None
    if reduction == "mean":  # over the rows of all ranks
        count = (target != ignore_index).sum()
        count = count.full_tensor() if isinstance(count, DTensor) else count
    attrs = (ignore_index, label_smoothing, z_loss, accum_dtype, reduction, wanted, count)
    op = torch.ops.cute.linear_cross_entropy_step
    loss, *gradients = op(*placed.local_inputs(tensors), *attrs, **_slice_of(placed))
    placements = [Replicate() if f in (None, placed.split) else Partial() for f in placed.factors]
    return placed.wrap(loss, placements, ()), *placed.wrap_outputs(gradients)


def _slice_of(placed: CallPlacements) -> dict[str, Any]:
    """This rank's slice of the classes, as arguments of an op."""
    own: Slice | None = placed.slice
    return {} if own is None else {"part": [own.whole, own.rank, own.ranks], "group": own.group}


def _scale(gradient: DTensor, dloss: Tensor) -> DTensor:
    factor = dloss.full_tensor() if isinstance(dloss, DTensor) else dloss
    scaled = torch.ops.cute.linear_cross_entropy_scale(gradient.to_local(), factor)
    return DTensor.from_local(
        scaled, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape,
        stride=gradient.stride(),
    )  # fmt: skip


_library = torch.library.Library("cute", "FRAGMENT")
for _name, _call in {
    # In inference mode the dispatcher does not decompose this op before it comes here.
    "linear_cross_entropy": loss_ops.linear_cross_entropy,
    "linear_cross_entropy_rows": _rows, "linear_cross_entropy_rows_bwd": _rows_bwd,
    "linear_cross_entropy_step": _step, "linear_cross_entropy_scale": _scale,
}.items():  # fmt: skip
    add_rule(f"cute::{_name}", _call, _library)
