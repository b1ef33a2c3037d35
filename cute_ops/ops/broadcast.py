"""How operands of an expression meet values of a shape: as NumPy broadcasts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Fit(NamedTuple):
    """How an operand meets the values.

    Attributes:
        shape: as :func:`cute_ops.fused` and :func:`cute_ops.fused_linear` take it.
        sizes: what it is broadcast to, reshaped.
        own: what it is reshaped to.
    """

    shape: str
    sizes: tuple[Any, ...]
    own: tuple[Any, ...]


def fit(shape: Sequence[Any], rows: Sequence[Any], n: Any, packed: bool, batch: Sequence[Any] = ()) -> Fit | None:
    """How an operand broadcasts, as NumPy does it, against values ``(*rows, n)`` or, of a packed weight, the product
    ``(*rows, 2n)``; None where it does not. Of a batch of weights ``rows`` are ``(*batch, m)``, and what the rows of an
    example share is given for each example.
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
    # Equal sizes first: whether one that depends on data is 1, torch.compile does not know.
    if len(lead) > len(rows) or any(size != row and size != 1 for size, row in zip(lead, beside, strict=True)):
        return None
    shared, columns = lead[: len(lead) - 1] if batch else [], () if width == "1" else (last,)
    if tuple(lead) != tuple(rows) and all(size == 1 for size in lead[len(shared) :]):  # one row, which all share
        return Fit("" if width == "1" else width, (*batch, *columns), (*shared, *columns))
    return Fit(f"*m {width}", (*rows, last), tuple(shape))
