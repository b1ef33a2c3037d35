"""Blocks of classes of a linear layer, of all rows: :class:`cute_ops.composite.chunks.Chunks` in torch.

A block's part of the weight's gradient is one product, rounded once. The gradient of the hidden states is summed over
blocks in float32. All blocks' logits lie in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cute_ops.composite import chunks
from cute_ops.declaration.op import Op
from cute_ops_torch.library.row_chunks import Chunks, Inputs, State, add_product, parts, put_logits


def by_classes(made: Chunks) -> Chunks:
    """Blocks of classes in place of chunks of rows, where that takes less memory: then each block has its part of the
    weight's gradient, which is no sum. For programs that know of each row what they need of all logits.
    """
    (rows, width), (classes, _) = made.hidden.shape, made.weight.shape
    size = chunks.classes_per_block(rows, width, classes, made.hidden.dtype.itemsize) if made.chooses else classes
    # Elements beside the gradients: a sum in float32 for each hidden state, and logits until that is rounded.
    others = 2 * rows * width + max(size - width, 0) * rows
    held = rows * made.pitch if len(made.slices) == 1 else 2 * made.weight.numel()
    return made if size >= classes or others >= held else ClassBlocks(made, size)


class ClassBlocks(Chunks):
    """The blocks of a call, ``size`` classes each, from the chunks whose place they take."""

    def __init__(self, made: Chunks, size: int) -> None:
        vars(self).update(vars(made))
        self._size = size

    def each(self, state: State, body: Callable[[State, slice], State]) -> State:
        classes = self.weight.shape[0]
        for start in range(0, classes, self._size):
            state = body(state, slice(start, min(start + self._size, classes)))
        return state

    def of_chunk(self, op: Op, inputs: Inputs, attrs: Inputs, at: slice) -> tuple[Inputs, Inputs]:
        assert op.split is not None and op.split.of_slice is not None
        given = {**op.keywords, **attrs}
        return op.split.of_slice(torch, inputs, given, at.start, at.stop - at.start, self.weight.shape[0])

    def cut(self, name: str, at: slice) -> Tensor:
        rows: Tensor = self.inputs[name]
        return rows

    def logits(self, at: slice, head: str = "") -> Tensor:
        if self.spare is None:
            self.spare = self.hidden.new_empty(self.hidden.shape[0], self._size)
        bias = None if self.bias is None else self.bias[at]
        place = self.spare[:, : at.stop - at.start]
        return put_logits(place, self.hidden, self.weight[at], bias, self._parts_of(at))

    def sums(self) -> dict[str, Tensor]:
        found = {"dweight": torch.empty_like(self.weight)}
        if "dhidden" in self.wanted:
            found["dhidden"] = torch.empty_like(self.hidden, dtype=torch.float32)
        if self.bias is not None and "dbias" in self.wanted:
            found["dbias"] = torch.empty_like(self.bias)
        return found

    def _parts_of(self, at: slice) -> Sequence[slice]:
        count = at.stop - at.start
        return parts(count, min(self.whole - at.start, count) or count)

    def put_product(self, array: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        first, block = at.start == 0, b[at]
        for part in self._parts_of(at):
            add_product(array, first, a[:, part], block[part])
            first = False
        return array

    def add_product(self, total: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        block = total[at]
        for part in self._parts_of(at):
            torch.mm(a[part], b, out=block[part])
        return total

    def add_rows(self, total: Tensor, at: slice, rows: Tensor) -> Tensor:
        total[at] = rows.sum(0, dtype=torch.float32)
        return total

    def rounded(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.spare = None  # its memory is the rounded gradient's to take
        found = dict(sums)
        if "dhidden" in sums:
            found["dhidden"] = self.all_rows(sums["dhidden"].to(self.hidden.dtype))
        return found
