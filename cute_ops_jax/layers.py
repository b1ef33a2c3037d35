"""Parts of modules of flax and equinox: the call of their row in :data:`cute_ops.composite.layers.LAYERS`,
and losses without parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar

import jax

import cute_ops_jax
from cute_ops.composite.layers import Layer
from cute_ops.errors import suggesting

Array = jax.Array


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


class Loss(Layered):
    """A loss, whose ``options`` are pairs: both libraries keep those out of what is traced."""

    options: tuple[tuple[str, Any], ...]

    def _keep(self, arguments: Mapping[str, Any]) -> None:
        """Keep those of a constructor's arguments that are options of the row."""
        self.options = tuple((name, arguments[name]) for name in self.layer.options)

    def _read(self, name: str) -> Any:
        return dict(self.options)[name] if name in self.layer.options else super()._read(name)


class CrossEntropy(Loss):
    """The constructor and the call of ``CrossEntropy``."""

    @suggesting
    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, classes: int = 0,
        softcap: float = 0.0, logit_scale: float = 1.0, reduction: str = "mean", inplace_backward: bool = False,
    ) -> None:  # fmt: skip
        self._keep(locals())

    def __call__(self, logits: Array, target: Array) -> Array:
        found: Array = self._run(logits, target)
        return found


class CrossEntropyMetrics(Loss):
    """The constructor and the call of ``CrossEntropyMetrics``."""

    @suggesting
    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
        logit_scale: float = 1.0, reduction: str = "mean", token_scaling: bool = False,
        inplace_backward: bool = False,
    ) -> None:  # fmt: skip
        self._keep(locals())

    def __call__(self, logits: Array, target: Array, weight: Array | None = None) -> tuple[Array, Array, Array, Array]:
        found: tuple[Array, Array, Array, Array] = self._run(logits, target, weight)
        return found


class CrossEntropyOfSlice(Loss):
    """The constructor and the call of ``CrossEntropyOfSlice``."""

    @suggesting
    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, classes: int = 0,
        softcap: float = 0.0, logit_scale: float = 1.0, inplace_backward: bool = False,
    ) -> None:  # fmt: skip
        self._keep(locals())

    def __call__(self, logits: Array, target: Array, lse_partial: Array) -> tuple[Array, Array, Array, Array]:
        found: tuple[Array, Array, Array, Array] = self._run(logits, target, lse_partial)
        return found


class SoftCrossEntropy(Loss):
    """The constructor and the call of ``SoftCrossEntropy``."""

    @suggesting
    def __init__(
        self, *, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        self._keep(locals())

    def __call__(self, logits: Array, target: Array) -> Array:
        found: Array = self._run(logits, target)
        return found


class Divergence(Loss):
    """The constructor and the call of ``Divergence``."""

    @suggesting
    def __init__(self, *, beta: float = 0.5, temperature: float = 1.0) -> None:
        self._keep(locals())

    def __call__(self, student: Array, teacher: Array) -> Array:
        found: Array = self._run(student, teacher)
        return found


def seed(key: Any) -> Any:
    """A seed of dropout, drawn with a key."""
    return jax.random.randint(key, (), 0, 2**31 - 1, dtype="int32")
