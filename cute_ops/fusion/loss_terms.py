"""Which cross entropy an expression of a row is, however it is written: found by its values.

Programs smooth labels and add a z-loss in many algebraic forms. An expression of analytic functions that is a sum of
the log-sum-exp, its square, the target's logit and the mean for some rows is that sum for all of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.reference import evaluate
from cute_ops.fusion.match import shortest

if TYPE_CHECKING:  # a program without losses needs no NumPy
    import numpy as np

_ROWS, _COLUMNS = 16, 24  # of the logits for which an expression is evaluated
_ANALYTIC = (
    "operand", "constant", "add", "subtract", "multiply", "divide", "negative", "square", "exp", "log", "sum", "mean",
)  # fmt: skip
_CLOSE = 1e-6
# How far below usual logits some rows are drawn: there a number that is added to their sum of exponentials shows in its
# logarithm, however small it is.
_LOW = 100.0


class Terms(NamedTuple):
    """``factor * (lse - (1 - smoothing) * y[target] - smoothing * mean(y) + z_loss * lse^2)``."""

    factor: float
    smoothing: float
    z_loss: float


class Target(NamedTuple):
    """``weight * y[target] + share * mean(y)``, of logits y or, with ``log_prob``, of ``y - lse``."""

    weight: float = 1.0
    share: float = 0.0
    log_prob: bool = False


@lru_cache(1024)
def terms_of(
    expression: Expression | None, at_target: tuple[bool, ...], n: int | str | None, target: Target
) -> Terms | None:
    """The terms of the cross entropy that an expression computes; None if it computes none.

    Args:
        expression: its operands are the logits and a value of the target; None is that value itself.
        at_target: for each operand whether it is the value of the target.
        n: the number of classes.
        target: the value of the target.
    """
    import numpy as np

    if expression is not None and (True not in at_target or not is_analytic(expression)):
        return None
    columns = n if expression is not None and _depends_on_length(expression) else _COLUMNS
    if not isinstance(columns, int):
        return None
    rng = np.random.default_rng(7)
    x = rng.standard_normal((_ROWS, columns)) * rng.uniform(0.2, 2, (_ROWS, 1)) + rng.standard_normal((_ROWS, 1)) * 2
    x = lowered(x)
    at = rng.standard_normal((_ROWS, 1))
    lse, mean = np.log(np.sum(np.exp(x), -1, keepdims=True)), np.mean(x, -1, keepdims=True)
    value = given = target.weight * at + target.share * mean - (target.weight + target.share) * target.log_prob * lse
    if expression is not None:
        value = evaluate(expression, np, [given if is_target else x for is_target in at_target])[0]
    if value.shape != at.shape:
        return None
    terms = np.concatenate([lse, at, mean, lse * lse, np.ones_like(at)], -1)
    return _terms(terms, value[:, 0], np)


@lru_cache(256)
def is_lse(expression: Expression, less: bool = False) -> bool:
    """Whether an expression of logits is their log-sum-exp, or with ``less`` the logits less that."""
    import numpy as np

    if not is_analytic(expression) or len(expression.outputs) != 1:
        return False
    rng = np.random.default_rng(8)
    for columns in (_COLUMNS, _COLUMNS + 13):
        x = lowered(rng.standard_normal((_ROWS, columns)) * 2 + rng.standard_normal((_ROWS, 1)))
        want = np.log(np.sum(np.exp(x), -1, keepdims=True))
        want = x - want if less else want
        value = evaluate(expression, np, [x] * len(expression.operands))[0]
        if value.shape != want.shape or not np.allclose(value, want, rtol=1e-10, atol=1e-10):
            return False
    return True


def lowered(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Logits whose last quarter of rows lies far lower, where ``log(sum(exp(x)) + eps)`` is no log-sum-exp."""
    x[-len(x) // 4 :] -= _LOW
    return x


def _terms(terms: np.ndarray[Any, Any], value: np.ndarray[Any, Any], np: Any) -> Terms | None:
    half = _ROWS // 2
    found = np.linalg.lstsq(terms[:half], value[:half], rcond=None)[0]
    if not np.allclose(terms @ found, value, rtol=1e-8, atol=1e-8) or not found[0]:
        return None
    factor = float(found[0])
    target, mean, square, rest = (float(each) / factor for each in found[1:])
    smoothing, z_loss = (0.0 if abs(each) < _CLOSE**1.5 else each for each in (-mean, square))
    if abs(1 + target + mean) > _CLOSE or abs(rest) > _CLOSE or not 0 <= smoothing < 1 or z_loss < 0:
        return None
    one = abs(abs(factor) - 1) < _CLOSE
    return Terms(round(factor) if one else factor, shortest(smoothing), shortest(z_loss))


def is_analytic(expression: Expression) -> bool:
    """Whether an expression has only analytic functions, beside the maximum of a row that shifts its exponents."""
    nodes = expression.nodes
    waiting, seen = list(expression.outputs), set[int]()
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        node = nodes[i]
        if node.primitive == "where":  # the maximum, or 0 where it is infinite
            condition, most, zero = node.args
            if nodes[condition].primitive != "less" or nodes[most].primitive != "max" or nodes[zero].number != 0:
                return False
            size, bound = nodes[condition].args
            while nodes[size].primitive in ("abs", "astype"):
                size = nodes[size].args[0]
            if size != most or nodes[bound].number != float("inf"):
                return False
            waiting.append(most)
            continue
        positive = node.primitive == "abs" and _is_sum_of_exponentials(expression, node.args[0])
        shift = node.primitive == "max" and nodes[node.args[0]].primitive == "operand"
        if node.primitive not in _ANALYTIC and not positive and not shift:
            return False
        waiting += node.args
    return True


def _is_sum_of_exponentials(expression: Expression, i: int) -> bool:
    node = expression.nodes[i]
    return node.primitive == "sum" and expression.nodes[node.args[0]].primitive == "exp"


def _depends_on_length(expression: Expression) -> bool:
    """Whether a sum of a row may be a mean, by a number that follows from the row's length."""
    return any(
        node.primitive == "sum" and not _is_sum_of_exponentials(expression, i)
        for i, node in enumerate(expression.nodes)
    )
