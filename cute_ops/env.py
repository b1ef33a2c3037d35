"""Numbers and paths that the environment sets."""

from __future__ import annotations

import os
from pathlib import Path


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


def path(name: str) -> Path | None:
    """The path that a variable names, ``~`` expanded as a shell would; None where it is not set or empty.

    Raises:
        ValueError: it begins with a ``~`` that stands for no folder.
    """
    text = os.environ.get(name)
    return _expanded(name, text) if text else None


def paths(name: str) -> list[Path]:
    """The paths that a variable lists, see :func:`path`."""
    return [_expanded(name, text) for text in os.environ.get(name, "").split(os.pathsep) if text]


def _expanded(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"the environment variable {name} holds {text!r}, but {text.partition('/')[0]} has no home folder: "
            "write the whole path"
        ) from error
