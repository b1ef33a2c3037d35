"""A function's expression and what it reads of arrays, as text: what a compiler is given.

``e1(t,s,...) add 0 9 -> 10 | 0f e1(t,s,...) -> 2`` adds to operand 0 an element of array 0, whose index is operand 2.
Kernels import this module, so that it imports the standard library only. See :mod:`cute_ops.expressions.captured`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.text import parse, text_of

FLOAT, INT, BOOL, SIZE = "fibs"  # of what is read: the elements of an array of these, or the size of a dim
# Primitives that make whole numbers: of any numbers, and of whole ones.
ROUND, WHOLE = ("floor", "round", "sign"), (
    "add", "subtract", "negative", "multiply", "square", "abs", "minimum", "maximum", "clip", "relu", "where"
)  # fmt: skip


class Read(NamedTuple):
    """An operand that is read from a captured array.

    Attributes:
        array: which one.
        kind: :data:`FLOAT`, :data:`INT`, :data:`BOOL`, or :data:`SIZE` and the number of a dim.
        place: an expression of the index, with one output for each dim; None of an array without dims, and of a size.
    """

    array: int
    kind: str
    place: Expression | None = None


class Mod(NamedTuple):
    """A function's expression, and what it reads: the last of its operands, in order."""

    expression: Expression
    reads: tuple[Read, ...] = ()

    @property
    def given(self) -> int:
        """How many operands are no reads."""
        return len(self.expression.operands) - len(self.reads)

    @property
    def text(self) -> str:
        reads = [" ".join([f"{r.array}{r.kind}", *([text_of(r.place)] if r.place else [])]) for r in self.reads]
        return " | ".join([text_of(self.expression), *reads])

    @classmethod
    def parse(cls, text: str) -> Mod:
        """The function of a :attr:`text`."""
        first, *others = text.split(" | ")
        reads = []
        for head, _, index in (each.partition(" ") for each in others):
            kind = head.lstrip("0123456789")
            reads.append(Read(int(head.removesuffix(kind)), kind, parse(index) if index else None))
        return cls(parse(first), tuple(reads))

    def depends(self, read: int) -> tuple[bool, bool]:
        """Whether what is read changes with the query, and with the key."""
        kind = self.expression.operands[self.given + read].kind
        return kind.rows, kind.columns


def known(mod: Mod) -> tuple[int, ...]:
    """How many numbers bound each operand of a mask over a tile of scores: a value, or the least and the largest. None
    what depends on both the query and the key, nor what is read of floats: these may be infinite.

    The operands are ``batch``, ``head``, ``q``, ``k``, their sizes, and what is read.
    """
    found = [1, 1, 2, 2, 1, 1, 1, 1]
    for i, read in enumerate(mod.reads):
        by_query, by_key = mod.depends(i)
        found.append(0 if read.kind == FLOAT or (by_query and by_key) else 2 if by_query or by_key else 1)
    return tuple(found)


def ranged(mod: Mod) -> tuple[list[int], list[int]]:
    """The reads of a mask that have bounds over a tile: those by query, and those by key."""
    pairs = [i for i, count in enumerate(known(mod)[mod.given :]) if count == 2]
    by_query = [i for i in pairs if mod.depends(i)[0]]
    return by_query, [i for i in pairs if i not in by_query]


def rounds_products(expression: Expression, floats: frozenset[int]) -> bool:
    """Whether it multiplies numbers of which float32 may round the product, so that it is not all the same whether that
    happens before something is added: not whole ones, and none of them a power of two. ``floats``: operands that may be
    no whole numbers.
    """
    whole = list[bool]()
    for node, kind in zip(expression.nodes, expression.kinds, strict=True):
        are_whole = all(whole[i] for i in node.args)
        is_exact = are_whole or any(_is_power_of_two(expression.nodes[i].number) for i in node.args)
        if node.primitive in ("multiply", "square") and not is_exact:
            return True
        if node.primitive == "operand":
            is_whole = node.operand not in floats
        elif node.number is not None:
            is_whole = node.number % 1 == 0
        else:
            is_whole = node.primitive in ROUND or kind.dtype == "bool" or (node.primitive in WHOLE and are_whole)
        whole.append(is_whole)
    return False


def _is_power_of_two(number: float | None) -> bool:
    return number is not None and abs(math.frexp(number)[0]) == 0.5
