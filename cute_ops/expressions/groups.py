"""How expressions with groups of columns read their operands."""

from __future__ import annotations

from typing import NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.primitives import PRIMITIVES


class Read(NamedTuple):
    """An operand as it is read.

    Attributes:
        operand: its index.
        half: of a packed one: ``[:n]`` or ``[n:]``.
        rotate: group size when ``rotate_half`` reads the opposite half of its group; 0 otherwise.
    """

    operand: int
    half: str
    rotate: int


# Primitives that reduce each group of columns to one value, which all of its columns get.
REDUCTIONS = ("group_sum", "group_max")


def reads(expression: Expression) -> tuple[Read, ...]:
    """The ways in which operands are read, each once, sorted.

    Raises:
        ValueError: the argument of a ``rotate_half`` depends on another one.
    """
    found: dict[tuple[int, int], None] = {}

    def visit(i: int, rotate: int) -> None:
        if (i, rotate) not in found:
            found[i, rotate] = None
            node = expression.nodes[i]
            if rotate and node.primitive == "rotate_half":
                raise ValueError("xp.rotate_half of a value that depends on xp.rotate_half")
            for arg in node.args:
                visit(
                    arg,
                    int(node.value)
                    if node.primitive == "rotate_half"
                    else 0
                    if node.primitive in REDUCTIONS
                    else rotate,
                )

    for i in expression.outputs:
        visit(i, 0)
    nodes = [(expression.nodes[i], rotate if expression.kinds[i].columns else 0) for i, rotate in found]
    return tuple(
        sorted({Read(node.operand, node.half, rotate) for node, rotate in nodes if node.primitive == "operand"})
    )


def sizes(expression: Expression, *primitives: str) -> tuple[int, ...]:
    """The sizes of its groups, or of the groups that these primitives take, each once."""
    of = primitives or [name for name, primitive in PRIMITIVES.items() if primitive.grouped]
    return tuple(sorted({int(node.value) for node in expression.nodes if node.primitive in of}))


def reduced(expression: Expression) -> tuple[int, ...]:
    """The operands with columns that reductions of groups depend on."""
    found = {node.args[0] for node in expression.nodes if node.primitive in REDUCTIONS}
    for i in reversed(range(len(expression.nodes))):
        if i in found:
            found.update(expression.nodes[i].args)
    operands = [expression.nodes[i] for i in found if expression.kinds[i].columns]
    return tuple(sorted({node.operand for node in operands if node.primitive == "operand"}))
