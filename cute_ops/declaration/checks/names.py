"""Names, texts and attributes of a declaration: what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from keyword import iskeyword
from typing import Any

from cute_ops.declaration.fields import Declaration

_KINDS = (bool, int, float, str)
_LEAST_NORMAL, _INT64 = 2.0**-1022, 2**63
# Names that references or generated code use, and names that torch's schemas refuse.
_TAKEN = frozenset({"Ellipsis", "TypeError", "ctx", "type", "xp"})
_NAMES = "names are letters, digits and underscores, begin with a letter and are not keywords"


def problems(op: Declaration) -> Iterator[str]:
    yield from _texts(op)
    yield from _names(op)
    yield from _defaults("attribute", op.attrs, _KINDS)
    yield from _defaults("scalar", op.scalars, (int, float))
    for name, choices in op.choices.items():
        if any(value != value for value in choices):
            yield f"attribute {name!r} may be nan, which equals no value that a call has"


def _texts(op: Declaration) -> Iterator[str]:
    """Texts, and tuples for which one text might be passed."""
    module, found, name = op.kernel.partition(":")
    if not op.program and not (found and all(word.isidentifier() for word in [*module.split("."), name])):
        yield f"kernel must be 'module:Class', got {op.kernel!r}"
    for what in ("static", "parallel", "contracted", "inner", "sources", "no_gradient", "mutates"):
        words = getattr(op, what)
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            yield f"{what} must be a tuple of names, got {words!r}"
    for variable, names in op.dtypes.items():
        if isinstance(names, str) or not names:
            yield f"dtype variable {variable} must have a tuple of dtype names, got {names!r}"
    if type(op.least_sm) is not int:
        yield f"least_sm must be a whole number, 89 for SM 8.9, got {op.least_sm!r}"


def _names(op: Declaration) -> Iterator[str]:
    if not _is_name(op.name):
        yield f"its name {op.name!r} cannot name a function; {_NAMES}"
    options = op.finish.defaults if op.finish else {}
    for what, names in (
        ("input", op.inputs), ("attribute", op.attrs), ("scalar", op.scalars), ("output", op.outputs),
        ("option", options),
    ):  # fmt: skip
        for name in names:
            if not _is_name(name):
                yield f"{what} {name!r} cannot be an argument's name; {_NAMES}"
            if name in _TAKEN:
                yield f"{what} {name!r} must have another name: this one has a meaning in references or schemas"
    every = [*op.inputs, *op.outputs, *op.attrs, *op.scalars, *options, *(op.dtypes.keys() & op.attrs.keys())]
    if len(set(every)) < len(every):
        yield f"names used twice: {sorted({name for name in every if every.count(name) > 1})}"


@cache
def _is_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not iskeyword(name) and not name.startswith("_")


def _defaults(what: str, defaults: Mapping[str, Any], kinds: tuple[type, ...]) -> Iterator[str]:
    for name, default in defaults.items():
        problem = f"{what} {name!r} has the default {default!r}, "
        if type(default) not in kinds:
            yield f"{problem}expected one of {', '.join(kind.__name__ for kind in kinds)}"
        if isinstance(default, float) and (not math.isfinite(default) or 0 < abs(default) < _LEAST_NORMAL):
            yield f"{problem}which torch's schemas cannot hold: take a normal one"
        if type(default) is int and not -_INT64 <= default < _INT64:
            yield f"{problem}which is no 64-bit number"
