"""Attributes as a declaration gives them: a default, or the values that one may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OneOf:
    """The values that an attribute may take, the default first: ``attrs={"approximate": OneOf("tanh", "none")}``."""

    def __init__(self, *values: Any) -> None:
        if len({type(v) for v in values}) != 1:
            raise ValueError(f"OneOf needs one value or more, all of one type, got {values}")
        self.values = values


def defaults_of(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The values of declared attributes that a call does not give."""
    return {name: value.values[0] if isinstance(value, OneOf) else value for name, value in attrs.items()}
