"""Halves of the rows of two linear heads: :class:`cute_ops.composite.chunks.Chunks` in torch.

A half's logits of the head that learns are held together: their gradient makes the gradients of hidden states and
weight by one product each. Those of the other head, which only their own rows need, lie where the gradients go, as many
rows at a time as fit there: the first half's in that of the weight, the second half's in that of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cute_ops.composite import chunks
from cute_ops_torch.library.row_chunks import Chunks, State, put_logits


def in_halves(made: Chunks) -> Chunks:
    """Two halves of the rows in place of several chunks, if the attribute ``accum_dtype`` is
    :data:`cute_ops.composite.chunks.AUTO` and if that takes less memory. Each half's part of the gradients is one
    product, which rounds it, though its logits may be computed a few rows at a time. For programs that overwrite
    logits with their gradient.
    """
    width = made.hidden.shape[1] if "dhidden" in made.wanted else 0
    plan = half, step, fits = chunks.plan_half(made.hidden.shape[0], width, made.pitch)
    others = (half if fits else half + step) * made.pitch
    chooses = made.chooses and made.accum == chunks.AUTO and len(made.slices) > 1
    return RowHalves(made, plan) if chooses and others < 2 * made.weight.numel() else made


class RowHalves(Chunks):
    """The halves of a call, from the chunks whose place they take, and what :func:`chunks.plan_half` gives of them."""

    def __init__(self, made: Chunks, plan: tuple[int, int, bool]) -> None:
        vars(self).update(vars(made))
        (half, step, self._fits), tile = plan, chunks.TILE
        self._halves = slice(0, half), slice(half, self.hidden.shape[0])
        fitting = self.weight.numel() // self.pitch
        self._steps = fitting // tile * tile or fitting, step
        self._held = self.hidden.new_empty(half, self.pitch)
        self._places: list[Tensor] = []  # of the other head's logits, for each half
        self.sums_apart = self.alone = False

    def each(self, state: State, body: Callable[[State, slice], State]) -> State:
        for half, step in zip(self._halves, self._steps, strict=True):
            for start in range(half.start, half.stop, step):
                state = body(state, slice(start, min(start + step, half.stop)))
        return state

    def put(self, array: Tensor, at: slice, rows: Tensor) -> Tensor:
        array[at] = rows
        return array

    def logits(self, at: slice, head: str = "") -> Tensor:
        second = at.start >= self._halves[1].start
        if head:
            place = self._places[second][: (at.stop - at.start) * self.pitch].view(-1, self.pitch)
        else:
            place = self._of_half(at)[0][at.start - self._halves[second].start :][: at.stop - at.start]
        hidden, weight, bias = (self.inputs[f"{head}{name}"] for name in ("hidden", "weight", "bias"))
        return put_logits(place[:, : weight.shape[0]], hidden[at], weight, bias, self._parts())

    def sums(self) -> dict[str, Tensor]:
        found = self._new_sums(self.wanted)
        self._places = [self.dweight.as_strided((self.weight.numel(),), (1,))]
        if self._fits:
            self._places.append(found["dhidden"][self._halves[1]].view(-1))
        else:
            self._places.append(self.hidden.new_empty(self._steps[1] * self.pitch))
        return found

    def _of_half(self, at: slice) -> tuple[Tensor, slice]:
        """The held logits, or their gradient, of the half that these rows are in, and its rows."""
        half = self._halves[at.start >= self._halves[1].start]
        return self._held[: half.stop - half.start], half

    def put_product(self, array: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        """Of the half that ends with these rows: then its gradient is complete."""
        held, half = self._of_half(at)
        return super().put_product(array, half, held, b) if at.stop == half.stop else array

    def add_product(self, total: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        """Of a half, too."""
        held, half = self._of_half(at)
        return super().add_product(total, half, held.t(), self.hidden[half]) if at.stop == half.stop else total
