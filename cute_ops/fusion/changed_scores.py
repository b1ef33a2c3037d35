"""The op of attention whose scores an expression of a program changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from cute_ops.declaration.op import Op
from cute_ops.expressions.graph import OPERANDS, SCALAR, Expression, Graph, Kind, Node, Operand, copied
from cute_ops.expressions.reads import Mod
from cute_ops.expressions.reads import Read as Reading
from cute_ops.expressions.simplify import SimplifyingGraph
from cute_ops.fusion.attention_arrays import Read
from cute_ops.fusion.scores import Scores
from cute_ops.ops.attention import mods
from cute_ops.ops.attention.attention import declare
from cute_ops.ops.expression.call import digest

# The operands of a change of scores: the score, batch, head, query and key, how many there are of each, what is read.
_GIVEN = (
    OPERANDS["t"], *mods.COORDINATES.values(), *[Operand(SCALAR)] * len(mods.COORDINATES),
)  # fmt: skip
_QUERY, _KEY, _QUERIES, _KEYS = 3, 4, 7, 8


def functions_of(scores: Scores, reads: Sequence[Read]) -> mods.Own:
    """The functions of the op; its captured arrays are those of the reads, in order."""
    made = _mod(scores, reads)
    names = [f"captured{i}" for i, _ in enumerate(reads)]
    shapes = mods.declared([made], names, _refuse)
    return mods.Own(made.text, "", tuple(zip(names, (read.kind for read in reads), map(" ".join, shapes), strict=True)))


def op_of(own: mods.Own) -> Op:
    """The op of these functions."""
    return declare(f"attention_found_{digest(own.score, *map(str, own.captured))}", own)


def _mod(scores: Scores, reads: Sequence[Read]) -> Mod:
    expression = scores.expression
    assert expression is not None
    read = [Operand(Kind(_QUERY - 1 in each.dims, _KEY - 1 in each.dims)) for each in reads]
    operands = (*_GIVEN, *read)
    places = {each.operand: len(_GIVEN) + i for i, each in enumerate(reads)}

    def operand(node: Node) -> int:
        return graph.operand(places.get(node.operand, 0))

    graph: Graph = SimplifyingGraph(operands)
    made = graph.finish([copied(expression, graph, operand)[scores.output]])
    return Mod(made, tuple(Reading(i, each.kind, _place(operands, each.dims)) for i, each in enumerate(reads)))


def _place(operands: Sequence[Operand], dims: Sequence[int]) -> Expression:
    """The index of an array with these dims of batch, head, query and key."""
    graph = SimplifyingGraph(operands)
    ahead = graph.add("subtract", graph.operand(_KEYS), graph.operand(_QUERIES))
    index = [
        graph.add("subtract", graph.operand(_QUERY), ahead) if dim + 1 == _QUERY else graph.operand(dim + 1)
        for dim in dims
    ]
    return graph.finish(index)


def _refuse(problem: str) -> NoReturn:
    raise ValueError(problem)
