"""Shapes as declarations write them, and arrays as binding sees them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

FLOATS = ("float32", "float16", "bfloat16")
ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "bool": 1,
}  # fmt: skip


class Array(NamedTuple):
    """Shape and dtype name of an array: all that binding needs to know of one."""

    shape: tuple[Any, ...]
    dtype: str


class Dim(NamedTuple):
    """One dim of a declared shape, ``factor`` times the size that its name binds: ``n``, ``2n``."""

    factor: int
    name: str

    def of(self, dims: Mapping[str, Any]) -> Any:
        """The size, None where the name's is not known."""
        size = dims.get(self.name)
        return None if size is None else size if self.factor == 1 else self.factor * size

    def __str__(self) -> str:
        return self.name if self.factor == 1 else f"{self.factor}{self.name}"


class Shape(NamedTuple):
    """A declared shape taken apart: the name of the leading dims or None, whether some of them may be missing, the
    other dims, and what is wrong with it.
    """

    rows: str | None
    broadcast: bool
    dims: tuple[Dim, ...]
    wrong: str = ""


@cache
def parse(shape: str) -> Shape:
    words = shape.split()
    leading = words.pop(0) if shape.startswith("*") else ""
    rows = leading.removeprefix("*").removeprefix("#")
    parts = [(word, word.lstrip("0123456789")) for word in words]
    dims = tuple(Dim(int(word.removesuffix(name) or 1), name) for word, name in parts)
    wrong = ""
    if any("*" in word for word in words):
        wrong = f"leading dims must come first, got {shape!r}"
    elif any(word[0] == "0" or not name.isidentifier() for word, name in parts) or (
        leading and not rows.isidentifier()
    ):
        wrong = f"{shape!r} is not a shape like '*m n' or '*#m 2n'"
    return Shape(rows or None, leading.startswith("*#"), dims, wrong)
