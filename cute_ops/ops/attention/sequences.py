"""Sequences that are packed one after another: which token is of which, for the references of attention.

Their lengths are known on the device alone, so a reference computes the scores of all tokens and keeps those of one
sequence. What follows the last sequence attends to nothing.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any, NamedTuple, Protocol

from cute_ops.declaration.array_api import beside, count_up_to


class Side(NamedTuple):
    """The tokens of queries, or those of keys.

    Attributes:
        number: of each token's sequence; behind the last sequence the number of sequences.
        place: of each token in its sequence.
        length: of each sequence, and 0.
    """

    number: Any
    place: Any
    length: Any


class Where(Protocol):
    """The queries and keys that scores are of, if they are not all of a batch's."""

    def coordinates(self, head: Any, heads: Any) -> list[Any]:
        """Batch, head, q and k of scores, and their sizes, in the dtype of ``head``, which is given."""

    def seen(self) -> Any:
        """Which scores there are."""


class Sequences:
    """The sequences of a call.

    Args:
        xp: the namespace of arrays.
        offsets: where sequences begin and the last one ends, of queries and of keys.
        tokens: how many queries and keys there are.
    """

    def __init__(self, xp: Any, offsets: tuple[Any, Any], tokens: tuple[Any, Any]) -> None:
        self.xp, self.count = xp, offsets[0].shape[0] - 1
        self.q, self.k = (self.side(*each) for each in zip(offsets, tokens, strict=True))

    def side(self, offsets: Any, tokens: Any) -> Side:
        """The tokens of packed sequences."""
        xp = self.xp
        offsets = xp.astype(offsets, xp.int32)
        token = xp.arange(tokens, dtype=xp.int32, **beside(xp, offsets))
        number = xp.astype(count_up_to(xp, offsets[1:], token), xp.int32) if self.count else xp.zeros_like(token)
        length = xp.concat([offsets[1:] - offsets[:-1], xp.zeros_like(offsets[:1])])
        return Side(number, token - offsets[number], length)

    def of_rows(self, rows: Any) -> Sequences:
        """These queries and all keys."""
        found = copy(self)
        found.q = Side(self.q.number[rows], self.q.place[rows], self.q.length)
        return found

    def coordinates(self, head: Any, heads: Any) -> list[Any]:
        """Batch, head, q and k of scores (..., s, t), and their sizes, in the dtype of ``head``, which is given."""
        xp, number = self.xp, self.q.number[:, None]
        size_q, size_k = (side.length[number] for side in (self.q, self.k))
        place = self.q.place[:, None] + size_k - size_q
        given = (number, place, self.k.place, xp.zeros_like(number) + self.count, size_q, size_k)
        batch, q, k, count, *sizes = (xp.astype(x, head.dtype) for x in given)
        return [batch, head, q, k, count, heads, *sizes]

    def seen(self) -> Any:
        """Whether a query and a key, (s, t), are of one sequence."""
        number = self.q.number[:, None]
        return (number == self.k.number) & (number < self.count)

    def unknown(self, of_q: tuple[Any, ...], of_k: tuple[Any, ...]) -> Any:
        """NaN for each sequence of which an element of these arrays, (tokens, heads, d), is not finite, and else 0.
        A product with a weight of 0 would spread it to other sequences.
        """
        xp, place = self.xp, beside(self.xp, self.q.number)
        numbers = xp.arange(self.count + 1, dtype=xp.int32, **place)
        some = numbers < 0
        for side, arrays in ((self.q, of_q), (self.k, of_k)):
            for array in arrays:
                of_token = side.number.shape[0], math.prod(array.shape[-2:])
                wrong = xp.any(~xp.isfinite(xp.reshape(array, of_token)), axis=-1)
                some = some | xp.any((side.number[:, None] == numbers) & wrong[:, None], axis=0)
        zero = xp.zeros_like(xp.astype(numbers, xp.float32))
        return xp.where(some & (numbers < self.count), zero + math.nan, zero)


def fill_offsets(xp: Any, arrays: dict[str, Any]) -> None:
    """Make offsets of random numbers: ascending ones from 0 up to the last token, or a few before it."""
    for name, of in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        if name not in arrays:  # keys lie in a cache
            continue
        offsets = xp.sort(arrays[name])
        offsets[0] = 0
        if offsets.shape[0] > 2:
            offsets[-1] = arrays[of].shape[0]
        arrays[name] = offsets
