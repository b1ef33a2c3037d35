"""Array code that a Python function runs on the outputs of its op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cute_ops.errors import shown


class Finish(NamedTuple):
    """Array code that Python functions run on an op's outputs; the framework differentiates it.

    Args:
        apply: ``apply(xp, inputs, outputs, attrs, **options) -> outputs``; the first three are mappings by name.
        options: the values that each option may take, its default first.
        plain: option values with which the outputs come back as they are.
    """

    apply: Callable[..., Mapping[str, Any]]
    options: Mapping[str, tuple[Any, ...]]
    plain: Mapping[str, Any]

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: choices[0] for name, choices in self.options.items()}

    def check(self, what: str, options: Mapping[str, Any]) -> None:
        """Raise ValueError for a value that an option does not take, of the function ``what``."""
        for name, choices in self.options.items():
            value = options[name]
            if type(value) is str and value in choices:
                continue
            if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
                known = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"cute.{what}: option `{name}` is {shown(value)}, expected {known}.")
