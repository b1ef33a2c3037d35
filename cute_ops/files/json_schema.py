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


def check(value: Any, shape: Any, path: tuple[Any, ...] = ()) -> None:
    """Raise ValueError, which names the place, unless the value has this shape.

    Args:
        path: where the value is: ``(path of what holds it, name or index)``, so that valid values cost no text.
    """
    kind = type(shape)
    if kind is Either:
        shape = next((one for one in shape if _is(value, one)), shape)
        kind = type(shape)
    if not _is(value, shape):
        raise ValueError(f"{_place(path)} is {_shown(value)}, expected {_named(shape)}")
    if kind in (list, tuple, dict):
        for key, one in _inside(value, shape, kind, path).items():
            if type(value[key]) is not one:  # most values are seen to be right without a call
                check(value[key], one, (path, key))


def _inside(value: Any, shape: Any, kind: type, path: tuple[Any, ...]) -> dict[Any, Any]:
    """The shapes of the values in a list or an object."""
    if kind is list:
        return dict.fromkeys(range(len(value)), shape[0])
    if kind is tuple:
        if len(value) != len(shape):
            raise ValueError(f"{_place(path)} has {len(value)} values, expected {len(shape)}")
        return dict(enumerate(shape))
    if str in shape:
        return {name: shape.get(name, shape[str]) for name in value}
    if missing := [name for name in shape if name not in value and not name.endswith("?")]:
        raise ValueError(f"{_place(path)} has no {missing[0]!r}")
    return {field: one for name, one in shape.items() if (field := name.removesuffix("?")) in value}


def _place(path: tuple[Any, ...]) -> str:
    words = []
    while path:
        path, key = path
        words.append(f"[{key}]" if isinstance(key, int) else f".{str(key)[:100]}")
    return "".join(reversed(words)).lstrip(".") or "it"


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
