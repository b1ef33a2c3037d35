"""The order in which the reductions of a row are taken: those that do not wait for each other are taken together."""

from __future__ import annotations

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.words import WORDS


def levels(expression: Expression) -> tuple[int, ...]:
    """How many stages of reductions come before each node's value is known."""
    found: list[int] = []
    for node in expression.nodes:
        before = max((found[i] for i in node.args), default=0)
        found.append(before + 1 if _reduces(node.word) else before)
    return tuple(found)


def stages(expression: Expression) -> tuple[tuple[int, ...], ...]:
    """The reductions of each stage, as nodes: ``x * rsqrt(mean(x * x))`` has one stage, a softmax two."""
    of = levels(expression)
    reductions = [i for i, node in enumerate(expression.nodes) if _reduces(node.word)]
    return tuple(tuple(i for i in reductions if of[i] == stage) for stage in range(1, max(of, default=0) + 1))


def _reduces(word: str) -> bool:
    return word in WORDS and WORDS[word].reduces
