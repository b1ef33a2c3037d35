"""How functions with another library's arguments refuse what our ops do not compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cute_ops.errors import is_array, no_attribute, shown


def only(function: str, **options: tuple[Any, Any]) -> None:
    """Raise for the first option, ``name=(given, computed)``, whose value is not the one that is computed."""
    for name, (given, computed) in options.items():
        if given is not computed and (is_array(given) or given != computed):
            raise NotImplementedError(
                f"{function}: {name}={_text(given)} is not implemented, only {name}={computed!r}."
            )


def one_of(function: str, name: str, given: Any, computed: Sequence[Any]) -> None:
    """Raise for an option that has none of the values that are computed."""
    if given not in computed:
        raise NotImplementedError(
            f"{function}: {name}={_text(given)} is not implemented, only {', '.join(map(repr, computed))}."
        )


def _text(value: Any) -> str:
    return str(value) if isinstance(value, torch.dtype) else shown(value).removeprefix("an array ")


def missing(module: str, names: Sequence[str], instead: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: lists its names, and says what to call instead of those that begin so."""

    def __getattr__(name: str) -> Any:
        hints = [f"; {text}" for start, text in instead.items() if name.startswith(start)]
        raise no_attribute(module, name, names, "".join(hints) + f"; there are {', '.join(names)}")

    return __getattr__
