"""JSON of a stated shape: one checker for every record that this package reads.

A shape is data: a type (``str``, ``int``, ``float``, ``bool``, ``object`` for anything), ``None``; a set of values; a
tuple of alternatives ``Either(int, None)``; ``[shape]`` for a list of any length, ``(shape, shape)`` for one of just
these; ``{str: shape}`` for names of any kind, ``{"name": shape, "other?": shape}`` for fields, of which those with a
question mark may be missing. Fields that no shape names are left alone.
"""

from __future__ import annotations

import json
from typing import Any


class Either(tuple):
    """One of several shapes: ``Either(int, None)``."""

    def __new__(cls, *shapes: Any) -> Either:
        return super().__new__(cls, shapes)


def parse(text: str | bytes, shape: Any) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or has another shape; says where.
    """
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text)  # no other encoding is guessed
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    check(value, shape)
    return value


def check(value: Any, shape: Any, where: str = "") -> None:
    """Raise ValueError, naming the place, unless a value has a shape."""
    if isinstance(shape, Either):
        if not any(_is(value, one) for one in shape):
            raise _wrong(value, shape, where)
        for one in shape:
            if _is(value, one):
                check(value, one, where)
                return
    if not _is(value, shape):
        raise _wrong(value, shape, where)
    if isinstance(shape, (list, tuple)):
        if isinstance(shape, tuple) and len(value) != len(shape):
            raise ValueError(f"{where or 'it'} has {len(value)} values, expected {len(shape)}")
        for index, one in enumerate(value):
            check(one, shape[0] if isinstance(shape, list) else shape[index], f"{where}[{index}]")
    elif isinstance(shape, dict) and str in shape:
        for name, one in value.items():
            check(one, shape[str], f"{where}.{name}"[:200])
    elif isinstance(shape, dict):
        for name, one in shape.items():
            field = name.removesuffix("?")
            if field in value:
                check(value[field], one, f"{where}.{field}")
            elif field == name:
                raise ValueError(f"{where or 'it'} has no {field!r}")


def _is(value: Any, shape: Any) -> bool:
    """Whether a value is of a shape's kind, whatever it holds."""
    if isinstance(shape, (frozenset, set)):
        return isinstance(value, str) and value in shape
    if shape is None:
        return value is None
    if isinstance(shape, (list, tuple)):
        return isinstance(value, list)
    if isinstance(shape, dict):
        return isinstance(value, dict)
    return shape is object or type(value) is shape  # True is an int to isinstance


def _wrong(value: Any, shape: Any, where: str) -> ValueError:
    return ValueError(f"{where.lstrip('.') or 'it'} is {_shown(value)}, expected {_named(shape)}")


def _shown(value: Any) -> str:
    text = {list: "a list", dict: "an object", type(None): "null"}.get(type(value))
    return text or json.dumps(value)[:60]


def _named(shape: Any) -> str:
    if isinstance(shape, Either):
        return " or ".join(map(_named, shape))
    if isinstance(shape, (frozenset, set)):
        return " or ".join(sorted(map(repr, shape)))
    if isinstance(shape, dict):
        return "an object"
    if isinstance(shape, (list, tuple)):
        return "a list"
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", None: "null"}
    return names[shape]
