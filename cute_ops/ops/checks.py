"""Checks that declarations share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.errors import is_array, shown

LARGEST = sys.float_info.max
FINITE, NOT_NEGATIVE = (-LARGEST, LARGEST), (0.0, LARGEST)
MOST_FACTOR = 2.0**126  # float32 holds its reciprocal, too
TERM = (-1e37, 1e37)  # of a loss in float32


def no_columns(binding: Binding, name: str) -> str | None:
    """Refuse rows without columns, which have no maximum and no mean."""
    n = binding.dims["n"]
    return f"argument `{name}` has n={n}, expected at least 1." if isinstance(n, int) and n < 1 else None


def within(**bounds: tuple[float, float]) -> Callable[[Binding], str | None]:
    """A check of attributes that are numbers: the least and the largest value of each."""

    def check(binding: Binding) -> str | None:
        for name, (least, most) in bounds.items():
            value = binding.attrs[name]
            if not least <= value <= most:
                return f"attribute `{name}` is {value}, expected {_range(least, most)}."
        return None

    return check


def factors(*names: str) -> Callable[[Binding], str | None]:
    """A check of attributes that are 0, or a number that kernels multiply or divide by in float32."""

    def check(binding: Binding) -> str | None:
        for name in names:
            value = binding.attrs[name]
            if value and not 1.0 / MOST_FACTOR <= abs(value) <= MOST_FACTOR:
                return f"attribute `{name}` is {value}, expected 0, or from 2^-126 to 2^126, as float32 holds it."
        return None

    return check


def check_flag(function: str, option: str, value: Any) -> None:
    """Raise TypeError unless an option of a function is a bool: ``"no"`` would be true."""
    if type(value) is not bool:
        problem = f"is {shown(value)}, expected none" if is_array(value) else f"must be bool, got {shown(value)}"
        raise TypeError(f"cute.{function}: option `{option}` {problem}.")


def inplace_backward_of(op: Op, value: Any) -> bool:
    """The option ``inplace_backward`` of an op's call; TypeError unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(message(op, f"option `inplace_backward` must be bool, got {shown(value)}."))
    return value


def _range(least: float, most: float) -> str:
    if most < LARGEST:
        return f"a number from {least:g} to {'' if float(f'{most:g}') == most else 'below '}{most:g}"
    return "a finite number" if least == -LARGEST else f"a finite number of at least {least:g}"
