"""Bounds of expressions over tiles, against the values of every element."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cute_ops.expressions import evaluate, text_of, trace
from cute_ops.expressions.intervals import Range, UnboundedError, bounds

POINT, INTERVAL, UNKNOWN = Range.POINT, Range.INTERVAL, Range.UNKNOWN
POSITIONS = {"q": "*m 1", "k": "n"}


def causal(xp: Any, q: Any, k: Any) -> Any:
    return k <= q


def window(xp: Any, q: Any, k: Any) -> Any:
    return xp.abs(q - k) <= 100


def prefix(xp: Any, q: Any, k: Any) -> Any:
    return (k <= q) | (k < 37)


def blocks(xp: Any, q: Any, k: Any) -> Any:
    return xp.floor(q / 48) == xp.floor(k / 48)


def dilated(xp: Any, q: Any, k: Any) -> Any:
    return xp.where(q - k < 64, q - k, 1e-2 * xp.square(q - k)) < 90


@pytest.mark.parametrize("mask", [causal, window, prefix, blocks, dilated])
def test_tiles_of_masks_are_what_their_elements_are(mask: Callable[..., Any]) -> None:
    """A full tile is full and an empty one is empty; most tiles are told, those astride an edge are partial."""
    found = bounds(trace(mask, POSITIONS), [INTERVAL, INTERVAL])
    assert found.unbounded == ()
    told = 0
    for q in range(0, 512, 64):
        for k in range(0, 512, 32):
            rows, columns = np.arange(q, q + 64)[:, None], np.arange(k, k + 32)
            whole = mask(np, rows, columns)
            ends = [np.float32(x) for x in (q, q + 63, k, k + 31)]
            always, ever = (bool(x) for x in evaluate(found.expression, np, ends))
            assert always <= bool(whole.all()) and bool(whole.any()) <= ever, (q, k)
            told += (always, ever) == (bool(whole.all()), bool(whole.any()))
    assert told >= 120, "of 128 tiles"


def test_a_causal_mask_compares_two_numbers() -> None:
    assert text_of(bounds(trace(causal, POSITIONS), [INTERVAL, INTERVAL]).expression) == (
        "e1(s,s,s,s) less_equal 3 0; less_equal 2 1 -> 4 5"
    )


def test_what_has_no_range_makes_partial_tiles_and_is_named() -> None:
    def documents(xp: Any, q: Any, k: Any, of_q: Any, of_k: Any) -> Any:
        return (of_q == of_k) & (k <= q)

    mask = trace(documents, {**POSITIONS, "of_q": "*m 1", "of_k": "n"})
    found = bounds(mask, [INTERVAL, INTERVAL, UNKNOWN, UNKNOWN])
    assert text_of(found.expression) == "e1(s,s,s,s) less_equal 2 1 -> false 4"
    assert found.unbounded == ("operand 2", "operand 3")


def test_a_float_without_bounds_is_refused() -> None:
    with pytest.raises(UnboundedError, match=r"^an output depends on exp, which has no bounds$"):
        bounds(trace(lambda xp, q: xp.exp(q), {"q": "*m 1"}), [INTERVAL])


def _drawn(draw: random.Random, values: list[Any], bools: list[Any], xp: Any) -> None:
    """Add one value, a primitive of drawn ones."""
    x, y = draw.choice(values), draw.choice(values)
    number = draw.choice([-3.0, -0.5, 0.0, 0.25, 1.0, 2.0, 100.0])
    primitives: list[Callable[[], Any]] = [
        lambda: x + y, lambda: x - y, lambda: x * number, lambda: x * y * 2.0**-10, lambda: -x, lambda: xp.abs(x),
        lambda: xp.square(x) * 2.0**-10, lambda: xp.floor(x * 0.125), lambda: xp.minimum(x, y), lambda: xp.sign(x),
        lambda: xp.maximum(x, number), lambda: xp.clip(x, -50.0, 50.0), lambda: x / (number or 7.0),
        lambda: xp.where(draw.choice(bools), x, y),
    ]  # fmt: skip
    values.append(primitives[draw.randrange(len(primitives))]())
    a, b = draw.choice(values), draw.choice([*values, number])
    compared = draw.choice([lambda: a < b, lambda: a <= b, lambda: a == b])()
    both = xp.logical_and if draw.random() < 0.5 else xp.logical_or
    bools.append(draw.choice([compared, both(compared, draw.choice(bools)), xp.logical_not(compared)]))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_functions_lie_within_their_bounds(seed: int) -> None:
    def function(xp: Any, batch: Any, q: Any, k: Any) -> Any:
        draw = random.Random(seed)
        values, bools = [batch, q, k, q - k], [k <= q, q - k < 40]
        for _ in range(draw.randint(1, 12)):
            _drawn(draw, values, bools, xp)
        return values[-1] + q * 0.0, xp.logical_or(bools[-1], xp.logical_and(k < 0, q < 0))

    expression = trace(function, {"batch": "", **POSITIONS})
    found = bounds(expression, [POINT, INTERVAL, INTERVAL]).expression
    draw = random.Random(seed)
    for _ in range(8):
        batch, (q, k) = np.float32(draw.randrange(9)), (draw.randrange(300) for _ in range(2))
        rows = np.arange(q, q + draw.randint(1, 40), dtype=np.float32)[:, None]
        columns = np.arange(k, k + draw.randint(1, 40), dtype=np.float32)
        value, mask = evaluate(expression, np, [batch, rows, columns])
        ends = [batch, rows[0, 0], rows[-1, 0], columns[0], columns[-1]]
        low, high, always, ever = evaluate(found, np, ends)
        assert (low <= value).all() and (value <= high).all()
        assert bool(always) <= bool(mask.all()) and bool(mask.any()) <= bool(ever)
