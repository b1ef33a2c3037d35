"""Functions of tiles of several dtypes, and outputs that say theirs: drawn ops, for the tests of all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cute_ops import Op
from cute_ops.ops.expression.by_call import ByCall
from cute_ops.ops.expression.call import DTYPES

ROW = {"axis": -1, "keepdims": True}


def added(xp, x, y):
    return x + y


def gelu_beside_sum(xp, x, y, weight):
    total = x + y
    return xp.gelu(total) * weight, total


def norm_beside_sum(xp, x, y, weight):
    total = x + y
    return total * xp.rsqrt(xp.mean(total * total, **ROW) + 1e-6) * weight, total


def halves(xp, x, y):
    n = x.shape[-1] // 2
    return xp.silu(x[..., :n]) * x[..., n:] + y


def cosine(xp, x, y):
    return xp.sum(x * y, **ROW) * xp.rsqrt(xp.sum(x * x, **ROW) * xp.sum(y * y, **ROW) + 1e-6)


def divergence(xp, x, y):
    """Of two distributions, from logits; and the first one's log-sum-exp."""
    shifted = x - xp.max(x, **ROW)
    of_x = xp.log(xp.sum(xp.exp(shifted), **ROW))
    other = y - xp.max(y, **ROW)
    of_y = xp.log(xp.sum(xp.exp(other), **ROW))
    return xp.sum(xp.exp(shifted - of_x) * (shifted - of_x - other + of_y), **ROW), of_x


def momentum(xp, x, y, z):
    """An optimizer's step: state in the dtype that it had, whatever the gradient's."""
    state = 0.9 * y + 0.1 * x
    return xp.astype(state, y.dtype), xp.astype(z - 0.01 * state * xp.rsqrt(xp.abs(y) + 1.0), z.dtype)


def scaled(xp, x, y):
    return xp.astype(2.0 * x, "float32"), 0.5 * y


def modulated(xp, x, y, scale):
    return xp.astype(x * (1 + scale) + y, "bfloat16"), xp.astype(xp.sum(x * y, **ROW), x.dtype)


# With the kinds of their operands.
FUNCTIONS: dict[Callable[..., Any], str] = {
    added: "tt", gelu_beside_sum: "ttr", norm_beside_sum: "ttr", halves: "2tt", cosine: "tt", divergence: "tt",
    momentum: "ttt", scaled: "tt", modulated: "tte",
}  # fmt: skip


class Mixed(NamedTuple):
    """An op, its function, and the dtype of each tile by its letter: ``BF``."""

    op: Op
    function: Callable[..., Any]
    letters: str

    @property
    def dtype(self) -> str:
        """Of the first tile."""
        return DTYPES[self.letters[0]]


def of(function: Callable[..., Any], letters: Sequence[str]) -> Mixed:
    """The op of a function for tiles of these dtypes, one of which all may share."""
    given, kinds = iter(letters), FUNCTIONS[function]
    if len({*letters}) > 1:
        kinds = "".join(f"t{next(given)}" if kind == "t" else kind for kind in kinds)
    return Mixed(ByCall(function).op(kinds), function, "".join(letters))


def drawn(seed: int, count: int) -> Iterator[Mixed]:
    """So many ops, each function about equally often."""
    rng, functions = np.random.default_rng(seed), [*FUNCTIONS]
    for i in range(count):
        function = functions[i % len(functions)]
        yield of(function, rng.choice([*DTYPES], FUNCTIONS[function].count("t")).tolist())


def is_expanded(array: Any) -> bool:
    """Whether an array is one that calls expand: ``[rows, 1, n]``."""
    return array.ndim == 3 and array.shape[1] == 1
