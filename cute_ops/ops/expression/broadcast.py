"""How the operands of an expression broadcast to the shape of its values, as in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Fit(NamedTuple):
    """How an operand broadcasts to the values.

    Attributes:
        shape: its declared shape, as for :func:`cute_ops.fused` and :func:`cute_ops.fused_linear`.
        sizes: the sizes to which it is broadcast after it was reshaped.
        own: the sizes to which it is reshaped first.
    """

    shape: str
    sizes: tuple[Any, ...]
    own: tuple[Any, ...]

    @property
    def expanded(self) -> bool:
        """Whether it is a tile or a column vector that lacks some of the leading dims."""
        return "*m" in self.shape and self.own != self.sizes


def fit(shape: Sequence[Any], rows: Sequence[Any], n: Any, packed: bool, batch: Sequence[Any] = ()) -> Fit | None:
    """How an operand broadcasts to values ``(*rows, n)`` or, with ``packed``, to a product ``(*rows, 2n)``; None if it
    does not. For a batch of weights ``rows`` is ``(*batch, m)``, and an operand that all rows of an example share has
    the dims of the batch.
    """
    if not shape:
        return Fit("", tuple(batch), ())
    *lead, last = shape
    if last == n:
        width = "n"
    elif packed and last == 2 * n:
        width = "2n"
    elif last == 1:
        width = "1"
    else:
        return None
    beside = rows[max(len(rows) - len(lead), 0) :]
    # Equality is tested first, because torch.compile cannot tell whether a size that depends on data is 1.
    if len(lead) > len(rows) or any(size != row and size != 1 for size, row in zip(lead, beside, strict=True)):
        return None
    shared, columns = lead[: len(lead) - 1] if batch else [], () if width == "1" else (last,)
    if tuple(lead) != tuple(rows) and all(size == 1 for size in lead[len(shared) :]):  # one row, which all share
        return Fit("" if width == "1" else width, (*batch, *columns), (*shared, *columns))
    return Fit(f"*m {width}", (*rows, last), tuple(shape))
