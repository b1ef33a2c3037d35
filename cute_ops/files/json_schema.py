"""Checks that JSON has an expected shape: every record that this package reads goes through it.

A shape is one of:

- ``str``, ``int``, ``float``, ``bool`` or ``None``, or ``object`` for anything;
- ``frozenset({"a", "b"})``: one of these strings;
- ``Either(int, None)``: one of several shapes;
- ``[shape]``: a list of any length; ``(shape, shape)``: a list of exactly these;
- ``{"name": shape, "other?": shape}``: an object with these fields, ``other`` optional; further ones are ignored;
- ``{str: shape, "name": other}``: an object whose fields all have one shape, except those that are named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any


class Either(tuple[Any, ...]):
    """One of several shapes: ``Either(int, None)``."""

    def __new__(cls, *shapes: Any) -> Either:
        return super().__new__(cls, shapes)


def parse(text: str | bytes, shape: Any) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or its value has another shape; says where.
    """
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text)  # json would guess encodings
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    check(value, shape)
    return value


def check(value: Any, shape: Any) -> None:
    """Raise ValueError, which names the place, unless the value has this shape."""
    try:
        _check(value, shape)
    except _Mismatch as error:
        where = "".join(reversed(error.path)).lstrip(".")
        raise ValueError(f"{where or 'it'} {error.problem}") from None


class _Mismatch(Exception):
    """A value has another shape. Its path is collected while the exception propagates, so valid values cost none."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


def _check(value: Any, shape: Any) -> None:
    kind = type(shape)
    if kind is Either:
        shape = next((one for one in shape if _is(value, one)), shape)
        kind = type(shape)
    if not _is(value, shape):
        raise _Mismatch(f"is {_shown(value)}, expected {_named(shape)}")
    if kind is list:
        _check_each(enumerate(value), lambda _: shape[0], "[{}]")
    elif kind is tuple:
        if len(value) != len(shape):
            raise _Mismatch(f"has {len(value)} values, expected {len(shape)}")
        _check_each(enumerate(value), shape.__getitem__, "[{}]")
    elif kind is dict and str in shape:
        _check_each(value.items(), lambda name: shape.get(name, shape[str]), ".{}")
    elif kind is dict:
        fields = {name.removesuffix("?"): one for name, one in shape.items()}
        missing = [name for name in shape if name not in value and not name.endswith("?")]
        if missing:
            raise _Mismatch(f"has no {missing[0]!r}")
        _check_each(((name, value[name]) for name in fields if name in value), fields.__getitem__, ".{}")


def _check_each(entries: Iterable[tuple[Any, Any]], shape_of: Callable[[Any], Any], place: str) -> None:
    for key, one in entries:
        shape = shape_of(key)
        if type(one) is shape:
            continue
        try:
            _check(one, shape)
        except _Mismatch as error:
            error.path.append(place.format(str(key)[:100]))
            raise


def _is(value: Any, shape: Any) -> bool:
    """Whether a value is of a shape's kind; the values inside a list or an object are not looked at."""
    kind = type(shape)
    if kind is type:
        return shape is object or type(value) is shape  # True is an int to isinstance
    if kind is Either:
        return False
    if kind is frozenset:
        return type(value) is str and value in shape
    return shape is value if shape is None else type(value) is (dict if kind is dict else list)


def _shown(value: Any) -> str:
    text = {list: "a list", dict: "an object", type(None): "null"}.get(type(value))
    return text or json.dumps(value)[:60]


def _named(shape: Any) -> str:
    if isinstance(shape, Either):
        return " or ".join(map(_named, shape))
    if isinstance(shape, frozenset):
        return " or ".join(sorted(map(repr, shape)))
    if isinstance(shape, dict):
        return "an object"
    if isinstance(shape, (list, tuple)):
        return "a list"
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", None: "null"}
    return names[shape]
