"""Leave ignored rows out of the head's product: those of prompts, of padding, and of tokens that are not masked.

A BERT predicts 15% of its tokens, yet multiplies all of them by its head. How many labels count is read from the GPU
without a stop: their number is on its way to the host while the model runs, and the loss waits for it at most until
the GPU has begun this forward.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ops_torch.huggingface.bypass import is_eager

Tensor = torch.Tensor
_IGNORED = -100
# The part of rows that count from which on moving them costs about what their product saves.
_MOST = 0.75
# Rows that are kept are a multiple of this part of all, and of a product's tile: each number of rows is a plan of its
# own on the host, and a mask's number varies from step to step.
_STEP, _TILE = 64, 128


class CountedRows:
    """The labels of a batch, as a model is called with them.

    Args:
        labels: what the model is given; nothing but a plain tensor of integers is counted.
    """

    def __init__(self, labels: Any) -> None:
        self._labels: Tensor | None = None
        self._event: Any = None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not is_eager(labels) or _captures(labels):
            return
        self._labels, self._version = labels, labels._version
        self._count = (labels != _IGNORED).sum().to("cpu", non_blocking=True)
        if labels.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

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
        if self._event is not None:
            self._event.synchronize()
        rows = target.numel()
        step = max(_TILE, (1 << (rows - 1).bit_length()) // _STEP)
        size = -(-max(int(self._count), 1) // step) * step
        return (hidden, target) if size > _MOST * rows else _compact(hidden.reshape(rows, -1), target.reshape(-1), size)

    def _are(self, labels: Tensor) -> bool:
        """Whether these are the counted ones, or a view of all of them."""
        own = self._labels
        if own is None or own._version != self._version or not (own.is_contiguous() and labels.is_contiguous()):
            return False
        return (labels.data_ptr(), labels.numel(), labels.dtype) == (own.data_ptr(), own.numel(), own.dtype)


def _captures(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _compact(hidden: Tensor, target: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``size`` rows with all that count, in order; rows beyond these are ignored, too."""
    rows, counts = target.numel(), target != _IGNORED
    place = torch.where(counts, counts.cumsum(0) - 1, size)
    index = target.new_full((size + 1,), rows).scatter_(0, place, torch.arange(rows, device=target.device))[:size]
    found = target.new_full((size + 1,), _IGNORED).scatter_(0, place, target)[:size]
    return _Rows.apply(hidden, index), found  # type: ignore[no-untyped-call]


class _Rows(torch.autograd.Function):
    """Rows by indices of which none occurs twice, but for the number of rows, which stands for any row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index.clamp(max=x.shape[0] - 1))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        rows, columns = ctx.shape
        return dout.new_zeros(rows + 1, columns).index_copy_(0, index, dout)[:rows], None
