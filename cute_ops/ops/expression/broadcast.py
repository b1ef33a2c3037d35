"""How the operands of an expression broadcast to the shape of its values, as in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from cute_ops.declaration.shapes import FLOATS

NUMBER = "number"  # the shape of a Python number
TILES = ("*m n", "*m 2n")
SHARED = ("*b n", "*b 2n", "*b 1")  # of what all rows of an example share
# An argument's shape, :data:`NUMBER`, or None if it is left out.
Sizes = Sequence[Any] | str | None
Refuse = Callable[[str], NoReturn]


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


def fits(operands: Mapping[str, Sizes], halves: str, refuse: Refuse) -> tuple[Fit | None, ...]:
    """How each operand broadcasts to the shape of all of them; None for one that is left out.

    Args:
        operands: their shapes by name.
        halves: ``2`` for each operand that is read by halves, ``1`` for each other one.
        refuse: raises an error with what is wrong: they do not broadcast, or none has the shape of the result.
    """
    result = _result(operands, halves, refuse)
    if not result:
        refuse("no argument has a last dim, so the result has no rows.")
    *rows, n = result
    found = []
    for (name, shape), half in zip(operands.items(), halves, strict=True):
        columns = n * 2 if half == "2" else n
        how = _fit_of(shape, rows, columns)
        if how is None and shape is not None and not isinstance(shape, str):
            # Halves of one column, while others have more.
            refuse(f"argument `{name}` has {shape[-1]} columns, expected {columns}, two halves.")
        found.append(how._replace(shape=how.shape.replace("n", "2n")) if how and half == "2" else how)
    if not any(how is not None and how.shape in TILES for how in found):
        name = next(name for name, shape in operands.items() if not isinstance(shape, str | None))
        refuse(
            f"no argument has the shape of the result, {result}; one must, because its dtype is the result's: write "
            f"broadcast_to({name}, {tuple(result)})."
        )
    return tuple(found)


def _fit_of(shape: Sizes, rows: Sequence[Any], columns: Any) -> Fit | None:
    if shape is None:
        return None
    return Fit(shape, (), ()) if isinstance(shape, str) else fit(shape, rows, columns, False)


def _result(operands: Mapping[str, Sizes], halves: str, refuse: Refuse) -> list[Any]:
    """The shape to which all operands broadcast; of an operand with halves, one half does."""
    result: list[Any] = []
    for (name, shape), half in zip(operands.items(), halves, strict=True):
        if shape is None or isinstance(shape, str):
            continue
        sizes = [*shape]
        if half == "2":
            if not sizes or sizes[-1] % 2:
                columns = sizes[-1] if sizes else "no"
                refuse(f"argument `{name}` has {columns} columns, which two halves cannot share.")
            sizes[-1] = sizes[-1] // 2
        for i in range(1, min(len(sizes), len(result)) + 1):
            if sizes[-i] == result[-i] or sizes[-i] == 1:
                sizes[-i] = result[-i]
            elif result[-i] != 1:
                refuse(f"argument `{name}` has shape {[*shape]}, which does not broadcast with those before it.")
        result = result[: max(len(result) - len(sizes), 0)] + sizes
    return result


def of_examples(fits: Sequence[Fit | None]) -> tuple[Fit | None, ...]:
    """Operands ``[batch 1 n]`` and ``[batch 1 1]`` as what an example's rows share, beside a tile ``[batch m n]``."""
    whole = any(how is not None and how.shape.endswith(TILES) and not how.expanded for how in fits)
    return tuple(how and (_of_example(how) or how) for how in fits) if whole else tuple(fits)


def _of_example(how: Fit) -> Fit | None:
    if not how.expanded or len(how.own) != len(how.sizes) or len(how.own) < 3 or how.shape.partition(" ")[0] == "*b":
        return None
    *lead, own, last = how.own
    if own != 1 or lead != [*how.sizes[:-2]]:
        return None
    shape = "*b 1" if how.shape.endswith("*m 1") else how.shape.removeprefix("any ").replace("*m", "*b")
    return Fit(shape, (*lead, last), (*lead, last)) if shape in SHARED else None


def with_dtypes(fits: Sequence[Fit | None], dtypes: Sequence[str]) -> tuple[Fit | None, ...]:
    """Operands with dtypes in their shapes where these matter: an expanded tile has any dtype if another tile
    is whole, and tiles of several dtypes have each its own; bools and whole numbers have ``bool`` and ``int`` before
    their shape. ``dtypes`` has an empty text for what is no array.
    """
    fits = [_with_word(how, dtype) for how, dtype in zip(fits, dtypes, strict=True)]
    tiles = {i: how for i, how in enumerate(fits) if how is not None and how.shape in TILES}
    whole = [i for i, how in tiles.items() if not how.expanded] or [*tiles]
    different = len({dtypes[i] for i in whole}) > 1 and all(dtypes[i] in FLOATS for i in whole)
    own = {i: "any" for i in tiles if i not in whole} | {i: dtypes[i] for i in whole if different}
    return tuple(
        how._replace(shape=f"{own[i]} {how.shape}") if how is not None and i in own else how
        for i, how in enumerate(fits)
    )


def _with_word(how: Fit | None, dtype: str) -> Fit | None:
    """An operand with what stands before its shape where it holds no floats."""
    word = "bool" if dtype == "bool" else "int" if dtype.startswith(("int", "uint")) else ""
    return how._replace(shape=f"{word} {how.shape}".strip()) if how is not None and word else how
