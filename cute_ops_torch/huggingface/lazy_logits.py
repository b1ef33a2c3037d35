"""Logits that a language model has not computed: its hidden states, its head, and what it does with the product.

A ``forward`` of any build may hand them on, scale them (Cohere, Granite), cap them with a tanh (Gemma), drop positions
or merge leading dims on the way to its loss: to ``torch.nn.functional.cross_entropy``, however it gets there, or to
Hugging Face's function. That computes them a chunk at a time. Whatever else is asked of them is asked of the real
logits, which then exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Tensor = torch.Tensor


class Caps(NamedTuple):
    """The steps after a head's product: ``softcap * tanh(scale * product / softcap)``; without a cap ``scale *
    product``.
    """

    scale: float = 1.0
    softcap: float = 0.0


PLAIN = Caps()


Loss = Callable[..., Tensor | None]


class Lazy:
    """A tensor that has not been computed; ``compute`` gives it. What subclasses do not answer, the real one does."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._computed: Tensor | None = None

    @property
    def exist(self) -> bool:
        """Whether the tensor has been computed."""
        return self._computed is not None

    def narrow(self) -> Tensor:
        """The deferred product, computed once."""
        if self._computed is None:
            self._computed = self._compute()
        return self._computed

    def real(self) -> Tensor:
        """The tensor itself."""
        return self.narrow()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        return function(*realised(args), **realised(options or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.real()[index]


class LazyLogits(Lazy):
    """The logits of a head.

    Args:
        hidden: its input.
        head: a plain linear layer.
        compute: gives the real logits, in the dtype that the head gives them.
        loss: ``loss(logits, target, ignore_index=, label_smoothing=, reduction=)`` is their cross entropy, or None
            where our ops do not have it.
        scale: what the product is multiplied by and divided by so far, before a tanh; ``x / 49 * 49`` is x.
        outer: what the tanh is multiplied by; None before there is one.
        dtype: theirs.
        bias: what is added to the product; by default the head's bias.
    """

    def __init__(
        self, hidden: Tensor, head: nn.Linear, compute: Callable[[], Tensor], loss: Loss = lambda *_, **__: None,
        *, scale: tuple[Any, Any] = (1.0, 1.0), outer: Any = None, dtype: torch.dtype | None = None,
        bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(compute)
        self.hidden, self.head, self._loss = hidden, head, loss
        self._scale, self._outer, self.dtype = scale, outer, hidden.dtype if dtype is None else dtype
        self.bias: Tensor | None = head.bias if bias is None else bias

    @property
    def caps(self) -> Caps | None:
        """Scale and soft cap of the product, as our loss takes them; None if it does not."""
        factor, divisor = self._scale
        if self._outer is None:
            return Caps(factor / divisor) if factor / divisor > 0 else None
        logit_scale = factor * self._outer / divisor
        return Caps(logit_scale, self._outer) if logit_scale > 0 and self._outer > 0 else None

    def real(self) -> Tensor:
        """The logits themselves; :meth:`narrow` gives those before a cast to float32 if that was the last step: our
        losses do it on the way.
        """
        return self.narrow().to(self.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyLogits:
        return self

    def float(self) -> LazyLogits:
        return self._like(self.hidden, self.narrow, torch.float32)

    def to(self, *given: Any, **options: Any) -> Any:
        if not options and given == (self.device,):
            return self
        return self.float() if not options and given == (torch.float32,) else self.real().to(*given, **options)

    def view(self, *shape: Any) -> Any:
        return self._reshaped(shape, lambda real: real.view(*shape))

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped(shape, lambda real: real.reshape(*shape))

    def tanh(self) -> Any:
        if self._outer is not None:
            return self.real().tanh()
        return self._after(lambda real: real.tanh(), self._scale, 1.0)

    def __add__(self, other: Any) -> Any:
        """A bias of the classes (BART's) is one of the head."""
        plain = self.caps == PLAIN and self.dtype == self.hidden.dtype
        if not (plain and isinstance(other, Tensor) and other.dtype == self.dtype and _is_row(other, self.shape[-1])):
            return self.real() + realised(other)
        bias = other.reshape(-1) if self.bias is None else self.bias + other.reshape(-1)
        compute = lambda: self.narrow() + other  # noqa: E731
        return self._changed(self.hidden, compute, bias=bias)

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

    def _reshaped(self, shape: Any, apply: Callable[[Tensor], Tensor]) -> Any:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not isinstance(sizes, tuple | list) or not sizes or sizes[-1] != self.head.out_features:
            return apply(self.real())
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self._like(hidden, lambda: apply(self.narrow()), self.dtype)

    def _like(self, hidden: Tensor, compute: Callable[[], Tensor], dtype: torch.dtype) -> LazyLogits:
        """These logits for rows of ``hidden``, or in another dtype."""
        return self._changed(hidden, compute, dtype=dtype)

    def _after(self, apply: Callable[[Tensor], Tensor], scale: tuple[Any, Any], outer: Any) -> LazyLogits:
        compute = lambda: apply(self.real())  # noqa: E731
        return self._changed(self.hidden, compute, scale=scale, outer=outer)

    def _changed(self, hidden: Tensor, compute: Callable[[], Tensor], **changes: Any) -> LazyLogits:
        kept = {"scale": self._scale, "outer": self._outer, "dtype": self.dtype, "bias": self.bias}
        return LazyLogits(hidden, self.head, compute, self._loss, **{**kept, **changes})

    def cross_entropy(
        self, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
        reduction: str = "mean", label_smoothing: Any = 0.0,
    ) -> Tensor:  # fmt: skip
        """``torch.nn.functional.cross_entropy`` of the logits."""
        options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        rows = isinstance(target, Tensor) and self.hidden.ndim == 2 and target.shape == self.hidden.shape[:1]
        if rows and weight is None and size_average is None and reduce is None and not target.is_floating_point():
            loss = self._loss(self, target, **options)
            if loss is not None:
                return loss.to(self.dtype)
        return nn.functional.cross_entropy(self.real(), target, weight, size_average, reduce=reduce, **options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if function in (torch.tanh, torch.Tensor.tanh) and len(args) == 1 and not options:
            return args[0].tanh()
        if function is nn.functional.cross_entropy and isinstance(args[0], cls):
            return cls.cross_entropy(*args, **(options or {}))
        return super().__torch_function__(function, types, args, options)

    def __getitem__(self, index: Any) -> Any:
        if not _keeps_classes(index, len(self.shape)):
            return self.real()[index]
        return self._like(self.hidden[index], lambda: self.narrow()[index], self.dtype)


def _is_row(x: Tensor, n: int) -> bool:
    """Whether a tensor has one number for each of n classes, and none else."""
    return x.ndim > 0 and x.numel() == x.shape[-1] == n


def _keeps_classes(index: Any, dims: int) -> bool:
    """Whether an index takes slices of leading dims, and all of the last one."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is ... for part in parts):
        return False
    return (... not in parts and len(parts) < dims) or parts[-1] in (..., slice(None))


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.real(), name)(*realised(others))


for _name in (
    "add",
    "mul",
    "rmul",
    "truediv",
    "radd",
    "sub",
    "rsub",
    "rtruediv",
    "pow",
    "matmul",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
):
    setattr(Lazy, f"__{_name}__", _operator(f"__{_name}__"))


def realised(value: Any) -> Any:
    """A value, and what is in a tuple, a list or a dict, with real tensors."""
    if isinstance(value, Lazy):
        return value.real()
    if type(value) in (tuple, list):
        return type(value)(map(realised, value))
    return {key: realised(each) for key, each in value.items()} if type(value) is dict else value
