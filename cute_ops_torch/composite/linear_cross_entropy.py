"""Cross entropy of a linear layer's output, without all logits: :mod:`cute_ops.composite.linear_cross_entropy`."""

from __future__ import annotations

import torch

from cute_ops.composite import linear_cross_entropy as declared
from cute_ops.composite.public import continued
from cute_ops.errors import shown
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import define

Tensor = torch.Tensor
_rows = define(declared.linear_cross_entropy_rows).function
_total = define(declared.linear_cross_entropy_total).function


@checked
@continued(declared.DOC)
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
    softcap: float = 0.0,
    logit_scale: float = 1.0,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy`.

    Deterministic where the framework's matrix products are. ``chunk_rows`` None takes the fewest rows that cost little
    time; more rows, up to about 4096, are faster.

    Memory, beyond inputs and gradients, at 16384 x 2048 x 128256 in bfloat16: 1.05 GB for the weight's gradient in
    float32; the logits of a chunk of 2048 rows lie in the memory of its bfloat16 result. With
    ``accum_dtype=torch.bfloat16``: 0.13 GB.
    """
    accum = "float32" if accum_dtype is None else shown(accum_dtype)
    if isinstance(accum_dtype, torch.dtype):
        accum = str(accum_dtype).removeprefix("torch.")
    attrs = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    loss: Tensor = declared.loss(
        _rows, _total, (hidden, weight, target, bias), attrs, reduction=reduction, chunk_rows=chunk_rows,
        accum_dtype=accum, whole=type(target) is Tensor,
    )  # fmt: skip
    return loss


def loss_of_head(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, ignore_index: int, reduction: str,
    chunk_rows: int | None, label_smoothing: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
    count: Tensor | None = None, skip_ignored: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`linear_cross_entropy` of a patched model's head.

    Args:
        count: a number on the device of the losses, by which their sum is divided.
        skip_ignored: leave ignored rows out of the products, if that is worth it: waits for the device, but not where
            the last call of as many rows took all of them.
    """
    attrs = ignore_index, label_smoothing, 0.0, softcap, logit_scale
    loss: Tensor = declared.loss(
        _rows, _total, (hidden, weight, target, bias), attrs, reduction=reduction, chunk_rows=chunk_rows,
        accum_dtype="float32", count=count, skip_ignored=skip_ignored,
        whole=type(target) is Tensor,
    )  # fmt: skip
    return loss
