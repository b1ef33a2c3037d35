"""What modules of flax and of equinox share: the call of their row in :data:`cute_ops.composite.layers.LAYERS`."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

import jax

import cute_ops_jax
from cute_ops.composite.layers import Layer


class Layered:
    """A module that follows a row of the table; it is a base beside the library's own module."""

    layer: ClassVar[Layer]

    def _read(self, name: str) -> Any:
        """A parameter or an option, by the table's name."""
        return attrgetter(name)(self)

    def _arguments(self, given: tuple[Any, ...]) -> list[Any]:
        """The function's arguments by position: what the module is called with, between what it holds."""
        inputs = iter(given)
        held = [self._read(name) if name in self.layer.learned else next(inputs) for name in self.layer.arguments]
        return [*held, *inputs]

    def _run(self, *given: Any, **options: Any) -> Any:
        named = {name: self._read(name) for name in self.layer.options} | options
        return getattr(cute_ops_jax, self.layer.function)(*self._arguments(given), **named)


def seed(key: Any) -> Any:
    """A seed of dropout, drawn with a key."""
    return jax.random.randint(key, (), 0, 2**31 - 1, dtype="int32")
