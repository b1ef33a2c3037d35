"""Types that the modules of tuning share: calls to measure, and the results of measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.config import Config
from cute_ops.jit.layout import Memory
from cute_ops.jit.target import Target

LEAST = 0.02  # the fraction of the heuristic's time that a winner must save


class Trial(NamedTuple):
    """A call to measure."""

    binding: Binding
    memory: Mapping[str, Memory]


class Measurement(NamedTuple):
    """The result of measuring some configs on calls of one class.

    Attributes:
        which: the index of the config that is fastest beyond doubt.
        before: microseconds with the heuristic's config, by call.
        after: microseconds with the fastest config, by call.
        gain: the fraction of the time that the fastest saves; if the heuristic's stays, that of the best other one.
        refused: by index of a config, why its results are wrong.
        device: the GPU's name.
        chance: the probability of such a result by chance.
    """

    which: int
    before: list[float]
    after: list[float]
    gain: float
    refused: Mapping[int, str] = {}
    device: str = ""
    chance: float = 1.0


class Bench(Protocol):
    """Checks and times configs, the heuristic's first, on calls of one class."""

    def measure(
        self, trials: Sequence[Trial], configs: Sequence[Config], target: Target, least: float
    ) -> Measurement: ...

    def close(self) -> None: ...
