"""Warns of a function that has become many ops, because a number that it refers to keeps changing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from cute_ops.constants import make_room
from cute_ops.constants.reads import code_of

MANY = 64
_log = logging.getLogger("cute_ops")
_ops: dict[Hashable, set[str]] = {}


def note(function: Callable[..., Any], name: str, op: str) -> None:
    """Note that a function became this op; warn once of one that has become :data:`MANY`.

    Each is compiled by itself and stays for as long as the program runs.
    """
    code = code_of(function) or function
    if code not in _ops:
        make_room(_ops)
        _ops[code] = set()
    found = _ops[code]
    if len(found) < MANY:
        found.add(op)
        if len(found) == MANY:
            _log.warning(
                "%s has become %d ops, one for each value of its attributes and of the numbers that it refers to: make "
                "what changes an operand, such as an array without dims",
                name, MANY,
            )  # fmt: skip
