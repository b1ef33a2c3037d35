"""Numbers that the environment sets."""

from __future__ import annotations

import os


def number(name: str, default: float) -> float:
    """A variable's value, the default where it is not set or empty.

    Raises:
        ValueError: it is no number, or not above zero.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"the environment variable {name} is {text!r}, it must be a number above 0")
    return value
