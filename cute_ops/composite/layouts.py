"""Functions over ops for arrays of several layouts, written once for the arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from cute_ops.composite.group_norm import group_norm_first, group_norm_last

Array = TypeVar("Array")


class Layouts(Generic[Array]):
    """The functions of a framework.

    Args:
        register: makes functions of ops.
        channels_last: whether an image ``[N, C, H, W]`` lies in memory with its channels last.
    """

    def __init__(self, register: Callable[..., Any], channels_last: Callable[[Any], bool]) -> None:
        self._channels_last = channels_last
        self._group_norm = {True: register(group_norm_last), False: register(group_norm_first)}

    def group_norm(
        self, x: Array, weight: Array | None = None, bias: Array | None = None, groups: int = 32, eps: float = 1e-5,
        *, channels_last: bool = False,
    ) -> Array:  # fmt: skip
        """Normalisation of each example's groups of channels.

        ``out = (x - mean) * rsqrt(var + eps) * weight + bias``, mean and var over all positions of ``c / groups``
        neighbouring channels of an example

        Channels first, a group is read once; channels last, and in both gradients of weight and bias, twice.

        Args:
            x: ``T[n c *s]``, or ``T[n *s c]`` with ``channels_last``: any number of dims of positions, or none;
                float32, float16 or bfloat16. In PyTorch an image in ``torch.channels_last`` is read as it lies, and so
                is what is returned.
            weight: ``W[c]``, a float dtype of its own; ones where None.
            bias: ``B[c]``, a float dtype of its own; zeros where None.
            groups: of channels, a divisor of c.
            eps: added to the variance.
            channels_last: whether the last dim has the channels, not the second.

        Returns:
            The shape and dtype of x. Computed in float32, rounded once; deterministic.

        Raises:
            TypeError: a dtype that is not listed.
            ValueError: fewer than two dims, channels that groups do not divide, no position.

        Source: Wu and He, Group Normalization, 2018.
        """
        given: Any = x
        shape = tuple(given.shape)
        if len(shape) < 2:
            raise ValueError(f"cute.group_norm: argument `x` has {len(shape)} dims, expected at least 2.")
        if channels_last:
            rows = given.reshape((shape[0], -1, shape[-1])) if 0 not in shape else given[:, None]
            return self._group_norm[True](rows, weight, bias, groups, eps).reshape(shape)  # type: ignore[no-any-return]
        if self._channels_last(given):
            last = self.group_norm(given.permute(0, 2, 3, 1), weight, bias, groups, eps, channels_last=True)
            return last.permute(0, 3, 1, 2)  # type: ignore[attr-defined,no-any-return]
        rows = given.reshape((*shape[:2], -1)) if 0 not in shape else given
        return self._group_norm[False](rows, weight, bias, groups, eps).reshape(shape)  # type: ignore[no-any-return]
