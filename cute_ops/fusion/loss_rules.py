"""Losses of rows of probabilities whose function brings a derivative of its own: which loss and which gradient these
are, found by their values.

A training library's function of logits and one-hot rows gives the loss of each row and perhaps its z-loss, and its
gradient takes the rows' sum for one. Where it is as below for some rows, it is for all of them, as in
:mod:`cute_ops.fusion.loss_terms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.reference import evaluate
from cute_ops.fusion.graph import Node
from cute_ops.fusion.loss_terms import is_analytic, lowered
from cute_ops.fusion.match import shortest
from cute_ops.fusion.one_expression import between, expressed

Value: TypeAlias = tuple[Expression, list[Node]] | None
_ROWS, _COLUMNS = 16, (24, 37)
_CLOSE = 1e-6


class Rule(NamedTuple):
    """``sum(t) * lse - sum(t * x) + z_loss * lse^2`` for logits x and probabilities t.

    Attributes:
        z_loss: as above.
        of: ``logit``: with ``lse`` in place of its product; ``log_prob``: as above; ``whole``: as above, with the
            gradient for logits of ``logit``.
        others: for each other output a and b of ``a * lse + b * lse^2``, which has no gradient.
    """

    z_loss: float
    of: str
    others: tuple[tuple[float, float], ...]


class Given(NamedTuple):
    """Arguments, outputs and gradient of a loss function, as nodes of one graph.

    Attributes:
        logits, targets, dloss: its arguments, and the cotangent of its first output.
        outputs: its outputs, as its body computes them.
        forward: the same, as the first part of its derivative does.
        dlogits: the gradient for logits.
    """

    logits: Node
    targets: Node
    dloss: Node
    outputs: Sequence[Node]
    forward: Sequence[Node]
    dlogits: Node


def rule_of(given: Given) -> Rule | None:
    """Which loss a function is; None if it is none, or if its derivative is that of no loss."""
    leaves = {given.logits, given.targets, given.dloss}
    values = {node: _value(node, leaves, given.dloss) for node in (*given.outputs, *given.forward, given.dlogits)}
    found = {_fitted(given, values, columns) for columns in _COLUMNS}
    return found.pop() if len(found) == 1 else None


def _value(root: Node, leaves: set[Node], dloss: Node) -> Value:
    """A value as an expression and its leaves; None of one that no analytic expression of these computes."""
    nodes = between(root, leaves)
    found = expressed(nodes, root, False) if nodes else None
    return found if found is not None and is_analytic(found[0]) and _is_of_rows(*found, dloss) else None


def _is_of_rows(expression: Expression, leaves: Sequence[Node], dloss: Node) -> bool:
    """Whether each row is computed with its own columns, and with its number of the cotangent."""
    kinds = (str(operand) for operand in expression.operands)
    return all(kind == ("c" if leaf is dloss else "t") for kind, leaf in zip(kinds, leaves, strict=True))


def _fitted(given: Given, values: Mapping[Node, Value], columns: int) -> Rule | None:
    import numpy as np

    def terms_of(node: Node, terms: list[Any]) -> tuple[float, ...] | None:
        return None if (value := values[node]) is None else _terms(value, arrays, terms, np)

    rng = np.random.default_rng(columns)
    x = lowered(rng.standard_normal((_ROWS, columns)) * 2 + rng.standard_normal((_ROWS, 1)))
    t, dloss = rng.uniform(0.1, 1, (_ROWS, columns)), rng.standard_normal((_ROWS, 1)) + 3
    arrays = {given.logits: x, given.targets: t, given.dloss: dloss}
    lse, total = np.log(np.sum(np.exp(x), -1, keepdims=True)), np.sum(t, -1, keepdims=True)
    at, square = np.sum(t * x, -1, keepdims=True), lse * lse
    loss, *others = zip(given.outputs, given.forward, strict=True)
    terms = _same([terms_of(node, [lse, total * lse, at, square]) for node in loss])
    p = np.exp(x - lse)
    slope = terms_of(given.dlogits, [dloss * each for each in (p, total * p, t, lse * p)])
    if terms is None or slope is None or terms[2] != -1 or slope[2] != -1:
        return None
    z_loss = terms[3]
    of = _OF.get((*terms[:2], *slope[:2]))
    if of is None or z_loss < 0 or abs(slope[3] - 2 * z_loss) > _CLOSE * max(z_loss, 1e-3):
        return None
    more = [_same([terms_of(node, [lse, square]) for node in each]) for each in others]
    known = tuple((each[0], each[1]) for each in more if each is not None)
    return Rule(z_loss, of, known) if len(known) == len(more) else None


# By the factors of ``lse`` and of its product with the sum of the row, in the loss and in the gradient.
_OF: Mapping[tuple[float, ...], str] = {(1, 0, 1, 0): "logit", (0, 1, 0, 1): "log_prob", (0, 1, 1, 0): "whole"}


def _same(found: list[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    first, *others = found
    return first if all(each == first for each in others) else None


def _terms(
    value: tuple[Expression, list[Node]], arrays: Mapping[Node, Any], terms: list[Any], np: Any
) -> tuple[float, ...] | None:
    """The factors by which a value is the sum of these terms; None if it is none."""
    expression, leaves = value
    made = evaluate(expression, np, [arrays[leaf] for leaf in leaves])[0]
    if made.shape != terms[0].shape:
        return None
    columns = np.stack([np.broadcast_to(each, made.shape).ravel() for each in terms], -1)
    half = len(columns) // 2
    factors = np.linalg.lstsq(columns[:half], made.ravel()[:half], rcond=None)[0]
    if not np.allclose(columns @ factors, made.ravel(), rtol=1e-7, atol=1e-7):
        return None
    return tuple(_number(float(each)) for each in factors)


def _number(factor: float) -> float:
    """A factor as programs write it."""
    nearest = round(factor)
    return float(nearest) if abs(factor - nearest) < _CLOSE**1.5 else shortest(factor)
