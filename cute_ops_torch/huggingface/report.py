"""The report of ``patch``: a list of the modules that it replaced, which also says what it left and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

# Columns of the table, and of its labels.
_WIDTH, _INDENT = 80, 24


class Replaced(NamedTuple):
    """One module that :func:`patch` changed: its name in the model, and the op it now runs.

    ``attention_mask`` is a decoder: where it counts positions itself, its masks are made without searching them for
    packed sequences, which would wait for the GPU.
    """

    module: str
    op: str


class Left(NamedTuple):
    """One module that :func:`patch` left as it is, although it has ops for this kind: its name, and why."""

    module: str
    kind: str
    reason: str


class Patched(list[Replaced]):
    """The modules that :func:`patch` replaced, in the model's order; printed, a table of these and of those left.

    Attributes:
        model: the name of the model's class.
        left: decoder layers, losses, norms, rotary functions, MLPs, embeddings, masks, eager and multi-head
            attention that the model has and that go on running their own ``forward``, each with the reason.
    """

    def __init__(self, model: str, replaced: Iterable[Replaced], left: Iterable[Left]) -> None:
        super().__init__(replaced)
        self.model, self.left = model, list(left)

    @property
    def replaced(self) -> list[Replaced]:
        """The replaced modules, as a plain list."""
        return list(self)

    def __str__(self) -> str:
        left = f"{len(self.left)} left" if self.left else "none left"
        lines = [f"{self.model}: {len(self)} modules replaced, {left}"]
        for op, names in _by_first((each.op, each.module) for each in self).items():
            lines += _row(op, names)
        if self.left:
            lines.append("left as they are")
        for (kind, reason), names in _by_first(((each.kind, each.reason), each.module) for each in self.left).items():
            lines += _row(kind, names, f": {reason}")
        return "\n".join(lines)

    __repr__ = __str__


def describe(left: Iterable[Left]) -> str:
    """A sentence that names the modules left as they were."""
    found = _by_first(((each.kind, each.reason), each.module) for each in left)
    return "; ".join(
        f"its {kind}{'s' if len(names) > 1 else ''} {', '.join(grouped(filter(None, names)))}".rstrip() + f" ({reason})"
        for (kind, reason), names in found.items()
    )


def grouped(names: Iterable[str]) -> list[str]:
    """Names of modules, of which those that differ in a number only are one: ``layers.0-31.mlp``."""
    groups = [tuple(name.split(".")) for name in names]
    for place in reversed(range(max(map(len, groups), default=0))):
        alike: dict[tuple[str, ...], list[int]] = {}
        for parts in groups:
            if place < len(parts) and parts[place].isdigit():
                alike.setdefault((*parts[:place], "", *parts[place + 1 :]), []).append(int(parts[place]))
            else:
                alike[parts] = []
        groups = [
            (*parts[:place], _ranges(numbers), *parts[place + 1 :]) if numbers else parts
            for parts, numbers in alike.items()
        ]
    return [".".join(parts) for parts in groups]


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``0-3,5``."""
    steps = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in steps]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _by_first(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """The second elements of pairs by their first one."""
    found: dict[Any, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return found


def _row(label: str, names: Iterable[str], reason: str = "") -> list[str]:
    """Lines of a table: a label, and beside it the names of modules and what is said of them."""
    text = ", ".join(grouped(name or "the model" for name in names)) + reason
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False)
    return [f"  {label if i == 0 else '':{_INDENT - 2}}{line}" for i, line in enumerate(lines)]
