"""The bound on what is remembered of earlier calls."""

from __future__ import annotations

from typing import Any

# Calls per op and table; the oldest leaves first. Forgetting one costs a bind and a plan, no compile.
REMEMBERED = 4096


def make_room(*tables: dict[Any, Any]) -> None:
    """Make room for one more entry in each table; other threads may remove entries too."""
    for table in tables:
        while len(table) >= REMEMBERED:
            table.pop(next(iter(table)), None)
