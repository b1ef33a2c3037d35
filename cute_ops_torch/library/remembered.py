"""What is remembered of earlier calls, and its bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Calls per op and table; the oldest leaves first. Forgetting one costs a bind and a plan, no compile.
REMEMBERED = 4096


def remembered(table: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """A table's entry, made where there is none. Symbolic sizes and attributes have no hash: then it is made anew."""
    try:
        found = table.get(key)
    except TypeError:
        return make()
    if found is None:
        make_room(table)
        found = table[key] = make()
    return found


def make_room(*tables: dict[Any, Any]) -> None:
    """Make room for one more entry in each table; other threads may remove entries too."""
    for table in tables:
        while len(table) >= REMEMBERED:
            table.pop(next(iter(table)), None)
