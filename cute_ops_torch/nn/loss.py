"""The loss of a linear layer's output, as a module that has the layer's parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops.errors import suggesting
from cute_ops_torch.composite.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """:func:`cute_ops_torch.linear_cross_entropy` with a learned weight: ``(hidden, target) -> loss``.

    By position it takes what :class:`torch.nn.LinearCrossEntropyLoss` does.

    Args:
        n: size of the hidden states' last dim.
        classes: number of classes.
        bias: learn a bias.
        ignore_index, label_smoothing, z_loss, reduction: the function's.
        device: where the parameters are.
        dtype: of the parameters, and of the hidden states.
    """

    @suggesting
    def __init__(
        self, n: int, classes: int, *, bias: bool = False, ignore_index: int = -100, label_smoothing: float = 0.0,
        z_loss: float = 0.0, reduction: str = "mean", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.n, self.classes = n, classes
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction,
        }  # fmt: skip
        self.weight = nn.Parameter(torch.empty(classes, n, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as :class:`torch.nn.Linear` does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.n**-0.5), self.n**-0.5)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.n}, {self.classes}, bias={self.bias is not None}, {options}"

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **self.options)
