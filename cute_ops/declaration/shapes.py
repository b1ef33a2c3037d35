"""Shapes as declarations write them, and arrays as binding sees them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_ops.declaration import dims
from cute_ops.declaration.dims import Dim

FLOATS = ("float32", "float16", "bfloat16")
ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "bool": 1,
}  # fmt: skip
# Dtypes of sums, with the distance from 1 to the next number. Hopper's tensor cores keep 13 bits of sums of fp8.
ACCUMULATORS = {"float32": 2.0**-23, "float22": 2.0**-13, "float16": 2.0**-10}


class Array(NamedTuple):
    """Shape and dtype name of an array: all that binding needs to know of one."""

    shape: tuple[Any, ...]
    dtype: str


class Shape(NamedTuple):
    """A parsed shape: the name of the leading dims or None, whether they broadcast, the other dims, and what is wrong
    with the shape.
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
    found = [dims.parse(word) for word in words]
    known = tuple(dim for dim in found if dim is not None)
    wrong = ""
    if any(word.startswith("*") for word in words):
        wrong = f"leading dims must come first, got {shape!r}"
    elif leading and not rows.isidentifier():
        wrong = f"{shape!r} is not a shape like '*m n' or '*#m 2n'"
    elif len(known) < len(found):
        word = words[found.index(None)]
        wrong = f"{word!r} in {shape!r} is not a size like 'n', '2n', 'g*r', 'n/2', 'b+1', 'ceil(k/128)' or '3'"
    return Shape(rows or None, leading.startswith("*#"), known, wrong)
