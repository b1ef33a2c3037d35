"""Checks that declarations share."""

from __future__ import annotations

from cute_ops.binding import Binding


def no_columns(binding: Binding, name: str) -> str | None:
    """Rows of nothing have no maximum and no mean."""
    n = binding.dims["n"]
    return f"argument `{name}` has n={n}, expected at least 1." if isinstance(n, int) and n < 1 else None
