"""Logits that a causal language model has not computed: its hidden states, its head, and what it does with the product.

A ``forward`` of any build may hand them on, scale them (Cohere, Granite) or cap them with a tanh (Gemma) on the way to
its loss, which computes them a chunk at a time. Whatever else it asks of them is asked of the real logits, which then
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Tensor = torch.Tensor


class Caps(NamedTuple):
    """What happens to a head's product: ``softcap * tanh(scale * product / softcap)``; without a cap ``scale *
    product``.
    """

    scale: float = 1.0
    softcap: float = 0.0


PLAIN = Caps()


class LazyLogits:
    """The logits of a head.

    Args:
        hidden: its input.
        head: a plain linear layer.
        compute: gives the real logits.
        scale: what the product is multiplied by and divided by so far, before a tanh; ``x / 49 * 49`` is x.
        outer: what the tanh is multiplied by; None before there is one.
    """

    def __init__(
        self, hidden: Tensor, head: nn.Linear, compute: Callable[[], Tensor], scale: tuple[Any, Any] = (1.0, 1.0),
        outer: Any = None,
    ) -> None:  # fmt: skip
        self.hidden, self.head, self._compute, self._scale, self._outer = hidden, head, compute, scale, outer
        self._real: Tensor | None = None

    @property
    def caps(self) -> Caps | None:
        """What the loss is to do with the product; None where our loss does not."""
        factor, divisor = self._scale
        if self._outer is None:
            return Caps(factor / divisor) if factor / divisor > 0 else None
        logit_scale = factor * self._outer / divisor
        return Caps(logit_scale, self._outer) if logit_scale > 0 and self._outer > 0 else None

    def real(self) -> Tensor:
        """The logits themselves."""
        if self._real is None:
            self._real = self._compute()
        return self._real

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyLogits:
        return self

    def float(self) -> LazyLogits:
        """The loss computes in float32."""
        return self._after(lambda real: real.float(), self._scale, self._outer)

    def tanh(self) -> Any:
        if self._outer is not None:
            return self.real().tanh()
        return self._after(lambda real: real.tanh(), self._scale, 1.0)

    def __mul__(self, factor: Any) -> Any:
        return self._times(factor, factor, 1.0, lambda real: real * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self._times(divisor, 1.0, divisor, lambda real: real / divisor)

    def _times(self, number: Any, factor: Any, divisor: Any, apply: Callable[[Tensor], Tensor]) -> Any:
        if not isinstance(number, (int, float)) or isinstance(number, bool) or number == 0:
            return apply(self.real())
        if self._outer is None:
            return self._after(apply, (self._scale[0] * factor, self._scale[1] * divisor), None)
        return self._after(apply, self._scale, self._outer * factor / divisor)

    def _after(self, apply: Callable[[Tensor], Tensor], scale: tuple[Any, Any], outer: Any) -> LazyLogits:
        return LazyLogits(self.hidden, self.head, lambda: apply(self.real()), scale, outer)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if function in (torch.tanh, torch.Tensor.tanh) and len(args) == 1 and not options:
            return args[0].tanh()
        return function(*realised(args), **realised(options or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.real()[index]


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.real(), name)(*realised(others))


for _name in ("add", "radd", "sub", "rsub", "rtruediv", "pow", "matmul", "neg", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


def realised(value: Any) -> Any:
    """A value, and what is in a tuple, a list or a dict, with real logits."""
    if isinstance(value, LazyLogits):
        return value.real()
    if type(value) in (tuple, list):
        return type(value)(map(realised, value))
    return {key: realised(each) for key, each in value.items()} if type(value) is dict else value
