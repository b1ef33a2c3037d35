"""Dims as declared shapes write them: a name, a number, or a small expression of names."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_DIM = re.compile(
    r"(?P<literal>[1-9]\d*)|"
    r"(?P<ceil>ceil\()?(?:(?P<factor>[1-9]\d*)\*?)?(?P<names>[^\W\d]\w*(?:\*[^\W\d]\w*)*)(?:/(?P<divisor>[1-9]\d*))?"
    r"(?(ceil)\))(?P<offset>[+-][1-9]\d*)?"
)


@dataclass(frozen=True)
class Dim:
    """``factor * names / divisor + offset``: ``n``, ``2n``, ``g*r``, ``n/2``, ``b+1``, ``ceil(k/128)``, ``3``.

    Attributes:
        factor: a number; the whole dim if there are no names.
        names: the sizes that are multiplied.
        divisor: a number, which must divide the product unless the quotient is rounded up.
        ceil: whether the quotient is rounded up.
        offset: a number to add.
        name: the name, if the dim is nothing but a name; empty if it is an expression.
    """

    factor: int = 1
    names: tuple[str, ...] = ()
    divisor: int = 1
    ceil: bool = False
    offset: int = 0
    # A field, because binding reads it several times a call.
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        plain = len(self.names) == 1 and (self.factor, self.divisor, self.offset) == (1, 1, 0)
        object.__setattr__(self, "name", self.names[0] if plain else "")

    @property
    def outer(self) -> str:
        """The name whose slices are slices of the dim: ``g`` of ``g*r``, ``n`` of ``n``; empty if there is none."""
        alone = (self.factor, self.divisor, self.offset) == (1, 1, 0) and self.names
        return self.names[0] if alone and self.names.count(self.names[0]) == 1 else ""

    def __str__(self) -> str:
        product = f"{self.factor if self.factor != 1 or not self.names else ''}{'*'.join(self.names)}"
        if self.divisor != 1 or self.ceil:
            product = f"ceil({product}/{self.divisor})" if self.ceil else f"{product}/{self.divisor}"
        return f"{product}{self.offset:+}" if self.offset else product

    def of(self, dims: Mapping[str, Any]) -> Any:
        """The size, which may be symbolic; None where a name has no size."""
        size = self._product(dims)
        if size is None:
            return None
        if self.divisor != 1:
            size = -(-size // self.divisor) if self.ceil else size // self.divisor
        return size + self.offset if self.offset else size

    def wrong(self, dims: Mapping[str, Any]) -> str:
        """What was expected of the product or the size, if the sizes of the names do not allow the dim; else empty."""
        if not self.ceil and self.divisor != 1 and self._product(dims) % self.divisor != 0:
            return f"a multiple of {self.divisor // math.gcd(self.factor, self.divisor)}"
        return "at least 0" if self.offset < 0 and self.of(dims) < 0 else ""

    def bound(self, dims: Mapping[str, Any]) -> str:
        """The sizes of its names: ``g=2, r=4``."""
        return ", ".join(f"{name}={dims[name]}" for name in dict.fromkeys(self.names))

    def binds(self, known: Collection[str]) -> str:
        """The name whose size follows from the dim's size and the known names; empty if none does."""
        free = [name for name in self.names if name not in known]
        return free[0] if len(free) == 1 and not self.ceil else ""

    def solve(self, size: Any, dims: Mapping[str, Any]) -> Any:
        """The size of the name that :meth:`binds` gives, if the dim has this size; None if any would do because another
        name's size is 0.

        Raises:
            ValueError: none would do; the message says what is expected of the dim.
        """
        known = {name: dims[name] for name in self.names if name in dims}
        times = math.prod(known.values(), start=self.factor)
        rest = (size - self.offset if self.offset else size) * self.divisor
        if self.offset > 0 and rest < 0:
            raise ValueError(f"at least {self.offset}")
        if times == 0:
            return None
        if times != 1 and rest % times != 0:
            plain = self.divisor == 1 and self.offset == 0
            raise ValueError(f"a multiple of {times}" if plain else f"a size for a whole {self.binds(known)}")
        return rest if times == 1 else rest // times

    def _product(self, dims: Mapping[str, Any]) -> Any:
        size: Any = self.factor
        for name in self.names:
            other = dims.get(name)
            if other is None:
                return None
            size = size * other
        return size


def parse(word: str) -> Dim | None:
    """The dim that a word declares; None if it is not a dim."""
    found = _DIM.fullmatch(word)
    if found is None or (found["ceil"] and not found["divisor"]):
        return None
    if found["literal"]:
        return Dim(int(found["literal"]))
    numbers = (int(found[key] or default) for key, default in (("factor", 1), ("divisor", 1), ("offset", 0)))
    factor, divisor, offset = numbers
    return Dim(factor, tuple(found["names"].split("*")), divisor, bool(found["ceil"]), offset)
