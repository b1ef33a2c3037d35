"""Base class of modules that follow a row of :data:`cute_ops.composite.layers.LAYERS`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from cute_ops.composite.layers import Layer


class Layered(nn.Module):
    """A module with a row's parameters. Each ``forward`` is written out: a loop over the row's arguments would cost a
    call 1 us of host time.
    """

    layer: ClassVar[Layer]

    def _learn(self, name: str, size: Any, device: Any, dtype: torch.dtype | None) -> None:
        """Make a parameter that starts as a constant; None where it is not learned."""
        parameter = None if size is None else nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.register_parameter(name, parameter)
        self._start(name)

    def _start(self, name: str) -> None:
        if (parameter := getattr(self, name, None)) is not None:
            nn.init.constant_(parameter, self.layer.learned[name].value(getattr(self, "weight_offset", 0.0)))

    def reset_parameters(self) -> None:
        """Start anew: constants as the row has them, others as :class:`torch.nn.Linear`."""
        if isinstance(self, nn.Linear):
            nn.Linear.reset_parameters(self)
        for name, learned in self.layer.learned.items():
            if learned.start is not None:
                self._start(name)
