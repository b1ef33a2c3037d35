"""Leave ignored rows out of the head's product: those of prompts, of padding, and of tokens that are not masked.

A BERT predicts 15% of its tokens, yet multiplies all of them by its head. How many labels count is read from the GPU
without a stop: their number is on its way to the host while the model runs, and the loss waits for it at most until
the GPU has begun this forward. In a compiled graph, where no code of the host runs beside the model, the loss' op
counts them itself.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ops_torch.huggingface.bypass import is_eager
from cute_ops_torch.library.row_chunks import OnItsWay, find_kept, kept_size, put_rows, take_rows

Tensor = torch.Tensor
_IGNORED = -100


class CountedRows:
    """The labels of a batch, as a model is called with them.

    Args:
        labels: what the model is given; nothing but a plain tensor of integers is counted.
    """

    def __init__(self, labels: Any) -> None:
        self._labels: Tensor | None = None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not is_eager(labels) or _captures(labels):
            return
        self._labels, self._version = labels, labels._version
        self._count = OnItsWay((labels != _IGNORED).sum())

    def of(
        self, labels: Tensor, hidden: Tensor, target: Tensor, ignore_index: int, reduction: str
    ) -> tuple[Tensor, Tensor]:
        """The rows of ``hidden`` and of ``target`` that count if they are few, else all of them.

        Args:
            labels: what ``target`` is made of, as they are or moved by a token: no more of it counts than of them.
        """
        usual = ignore_index == _IGNORED and reduction in ("mean", "sum") and is_eager(hidden)
        if not (usual and self._are(labels) and hidden.device == labels.device and target.numel() == labels.numel()):
            return hidden, target
        rows = target.numel()
        size = kept_size(rows, int(self._count))
        if not size:
            return hidden, target
        kept = find_kept(target.reshape(-1), _IGNORED, size)
        return _Rows.apply(hidden.reshape(rows, -1), kept.places), kept.targets  # type: ignore[no-untyped-call]

    def _are(self, labels: Tensor) -> bool:
        """Whether these are the counted ones, or a view of all of them."""
        own = self._labels
        if own is None or own._version != self._version or not (own.is_contiguous() and labels.is_contiguous()):
            return False
        return (labels.data_ptr(), labels.numel(), labels.dtype) == (own.data_ptr(), own.numel(), own.dtype)


def _captures(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Rows(torch.autograd.Function):
    """The rows at these places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = x.shape[0]
        return take_rows(x, places)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return put_rows(dout, places, ctx.rows), None
