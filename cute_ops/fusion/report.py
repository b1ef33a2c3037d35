"""The regions found in a program, as lines, a table and a picture."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cute_ops.fusion.analyse import Call, Found
from cute_ops.fusion.choose import Choice
from cute_ops.fusion.composite import Composite

BAR, PICTURE = 16, 180  # columns of text


class Entry(NamedTuple):
    """One kind of part, or one reason.

    Attributes:
        becomes: the op, ``fused`` or ``linear``; empty if it stays.
        what: the expression, or the name of what no expression says.
        why: the reason if it stays, or if a product before it does.
        shape: the shape of its values, ``[4, 128, 64]``; empty of what is no expression.
        where: the loops and branches that it stands in, ``scan``.
        times: how often it stands there.
        gain: microseconds that a model expects it to save each time; None where it says nothing.
        module: the path of the module that it stands in, with ``*`` for numbers of layers: ``layers.*.mlp``.
    """

    becomes: str
    what: str
    why: str
    shape: str
    where: str
    times: int
    gain: float | None = None
    module: str = ""


class Report(list[Entry]):
    """The regions found, with ``print`` as lines, with ``rich.print`` as a table, and in a notebook as a picture of it.

    Attributes:
        name: the function.
        replaced: the entries that became something of ours.
        left: the others.
    """

    def __init__(self, name: str, entries: Iterable[Entry]) -> None:
        counts: Counter[Entry] = Counter()
        for entry in entries:
            counts[entry._replace(times=0)] += entry.times
        super().__init__(entry._replace(times=times) for entry, times in counts.items())
        self.name = name

    @property
    def replaced(self) -> list[Entry]:
        return [entry for entry in self if entry.becomes]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self if not entry.becomes]

    def __str__(self) -> str:
        lines = [f"{self.name}: {_total(self.replaced)} parts replaced, {_total(self.left)} left"]
        width = max((len(entry.becomes) for entry in self.replaced), default=0)
        for entry in self.replaced:
            gain = "" if entry.gain is None else f", about {entry.gain:.3g} us less"
            why = f": {entry.why}" if entry.why else ""
            said = f"{entry.becomes:{width}s} {_place(entry)}{_said(entry)}".rstrip()
            lines.append(f"  {entry.times:3d} x {said}{gain}{why}")
        if not self:
            lines.append("  it has only products, views and whole numbers, which run as they stand")
        if self.left:
            lines.append("left as they are")
        for entry in self.left:
            why = f": {entry.why}" if entry.why else ""
            lines.append(f"  {entry.times:3d} x {_place(entry)}{_said(entry)}{why}")
        return "\n".join(lines)

    def __rich__(self) -> Table:
        return self._table()

    def svg(self) -> str:
        """The table as a picture, with bars of what all places of an entry save together."""
        console = Console(record=True, file=io.StringIO(), width=PICTURE, color_system="truecolor", force_terminal=True)
        console.print(self._table(bars=True))
        return console.export_svg(title=self.name)

    def _table(self, *, bars: bool = False) -> Table:
        """The entries as rows: those that save most first, those that stay in grey."""
        table = Table("times", "becomes", "module", "what", "shape", "saves us", title=self.name)
        for name in ("together", "why not") if bars else ("why not",):
            table.add_column(name)
        most = max(map(_saved, self), default=0.0)
        for entry in (*sorted(self.replaced, key=_saved, reverse=True), *self.left):
            gain = "" if entry.gain is None else f"{entry.gain:.3g}"
            what = f"{entry.what} in {entry.where}" if entry.where else entry.what
            cells = map(Text, (str(entry.times), entry.becomes or "-", entry.module, what, entry.shape, gain))
            bar = [Bar(most or 1.0, 0, _saved(entry), width=BAR, color="green")] if bars else []
            table.add_row(*cells, *bar, Text(entry.why), style="" if entry.becomes else "dim")
        return table

    def _repr_svg_(self) -> str:
        return self.svg()


def entry_of(found: Found | Call | Composite, choice: Choice, where: str = "") -> Entry:
    """The entry of an expression, or of another op."""
    shape = [*found.rows, *([] if found.n is None else [found.n])]
    return Entry(choice.name, found.text, choice.why, text_of_shape(shape), where, 1)


def text_of_shape(shape: Iterable[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _saved(entry: Entry) -> float:
    """Microseconds that all places of an entry save together; 0 where they cost some, or no model says."""
    return max(entry.gain or 0.0, 0.0) * entry.times


def _total(entries: Iterable[Entry]) -> int:
    return sum(entry.times for entry in entries)


def _said(entry: Entry) -> str:
    """The expression of an entry as a line has it: with floats of six digits, and empty where the op's name says it."""
    if entry.what.startswith("e1(") and entry.becomes not in ("", "fused", "linear"):
        return ""
    return re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda number: f"{float(f'{float(number[0]):.6g}')}", entry.what)


def _place(entry: Entry) -> str:
    return "".join(f"{each} " for each in (entry.where and f"in {entry.where}", entry.module, entry.shape) if each)
