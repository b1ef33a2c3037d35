"""Operands that the rows of each example share: read in place, their gradients summed by the kernels."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cute_ops import Op, fused
from cute_ops.ops.expression.by_call import ByCall
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS

SEED = int(os.environ.get("CUTE_OPS_SEED", "37"))


def modulate(xp: Any, x: Any, gain: Any, shift: Any) -> Any:
    return x * (1 + gain) + shift


def normalised(xp: Any, x: Any, gain: Any, shift: Any) -> Any:
    x = x - xp.mean(x, axis=-1, keepdims=True)
    return x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + gain) + shift


def scaled(xp: Any, x: Any, scale: Any, weight: Any) -> Any:
    return xp.tanh(x * scale) * weight


def gated(xp: Any, x: Any, scale: Any, shift: Any) -> Any:
    n = x.shape[-1] // 2
    return xp.silu(x[..., :n] * scale) * x[..., n:] + shift


def halves(xp: Any, x: Any, y: Any, both: Any) -> Any:
    n = both.shape[-1] // 2
    return x * (1 + both[..., :n]) + y * both[..., n:]


# Functions, with the kinds of their operands.
CALLS = [
    (modulate, "tbb"), (modulate, "tbr"), (modulate, "tdt"), (modulate, "tbc"), (normalised, "tbb"), (scaled, "tdr"),
    (scaled, "tdb"), (scaled, "tsb"), (gated, "2tdb"), (halves, "tt2b"),
]  # fmt: skip


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize(("function", "kinds"), CALLS, ids=lambda each: getattr(each, "__name__", each))
def test_kernels_of_any_size_layout_and_dtype(function: Any, kinds: str) -> None:
    """Examples of few rows and of many, rows of whole vectors and others; each gradient alone, too."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *f"{function.__name__} {kinds}".encode()))
    op = ByCall(function).op(kinds)
    for each in (op, *(narrow for step in op.steps for narrow in (step, *step.narrowed))):
        for examples, rows, n in ((300, 2, 24), (1, 16, 2600), *drawn(rng, 3)):
            dtype, layout = str(rng.choice(["bfloat16", "float32", "float16"])), str(rng.choice(LAYOUTS))
            kernel_calls.check(kernel_calls.made(each, examples, n, dtype, layout, rng, m=rows))


def drawn(rng: np.random.Generator, count: int) -> list[tuple[int, int, int]]:
    """Examples, rows of each, and columns."""
    return [(int(rng.integers(1, 9)), int(rng.integers(1, 50)), int(rng.integers(1, 1200))) for _ in range(count)]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (modulate, {"x": "*m n", "gain": "h n", "shift": "h n"}),
        (normalised, {"x": "*m n", "gain": "h n", "shift": "n"}),
        (scaled, {"x": "*m n", "scale": "*m 1", "weight": "h n"}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_kernels_of_heads_of_tokens(function: Any, shapes: dict[str, str]) -> None:
    """Heads take turns with the rows of ``[h n]``, whose gradients are sums over tokens."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *f"heads {function.__name__}".encode()))
    op = fused(function, operands=shapes)
    assert op.steps[0].outputs["dx"].shape == "*m h n"
    for each in (op, *(narrow for step in op.steps for narrow in (step, *step.narrowed))):
        for heads, rows, n in ((300, 2, 24), (1, 16, 2600), *drawn(rng, 3)):
            dtype, layout = str(rng.choice(["bfloat16", "float32", "float16"])), str(rng.choice(LAYOUTS))
            kernel_calls.check(kernel_calls.made(each, rows, n, dtype, layout, rng, h=heads))


def test_operands_of_heads_and_of_examples_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"operands of examples, '\*b n', and of heads, 'h n', do not go together"):
        fused(modulate, operands={"x": "*m n", "gain": "h n", "shift": "*b n"})


def test_a_gradient_has_no_tile_for_what_rows_share() -> None:
    def shapes(op: Op) -> dict[str, str]:
        return {name: tensor.shape for name, tensor in op.outputs.items()}

    declared = {"x": "*m n", "gain": "*b n", "shift": "*b n"}
    for op in (ByCall(normalised).op("tbb"), fused(normalised, operands=declared)):
        assert shapes(op) == {"out": "*b m n"}
        assert shapes(op.steps[0]) == {"dx": "*b m n", "dgain": "*b n", "dshift": "*b n"}
    numbers = ByCall(scaled).op("tdr").steps[0]
    assert shapes(numbers) == {"dx": "*b m n", "dscale": "*b 1", "dweight": "n"}


def test_which_operands_an_example_shares() -> None:
    by_call = ByCall(modulate)

    def kinds(*shapes: tuple[int, ...]) -> list[str]:
        found = by_call.fits(shapes, "111", ("float32",) * 3)
        return [how.shape for how in found if how]

    assert kinds((4, 6, 8), (4, 1, 8), (4, 1, 1)) == ["*m n", "*b n", "*b 1"]
    assert kinds((2, 3, 6, 8), (2, 3, 1, 8), (1, 6, 8)) == ["*m n", "*b n", "any *m n"]
    assert kinds((4, 6, 8), (1, 1, 8), (1, 6, 8)) == ["*m n", "n", "any *m n"]
    assert kinds((4, 6, 8), (4, 6, 1), (6, 1)) == ["*m n", "*m 1", "*m 1"]
    # Without a tile of the result's shape they are tiles.
    assert kinds((4, 1, 8), (4, 6, 1), (4, 1, 1)) == ["*m n", "*m 1", "*m 1"]
    assert kinds((1, 6, 8), (4, 1, 8), (8,)) == ["*m n", "*m n", "n"]


def test_more_rows_than_32_bits_count_are_refused() -> None:
    from cute_ops import Array
    from cute_ops.declaration.binding import bind

    op = ByCall(modulate).op("tbb")
    arrays = {name: Array(t.of({"b": (2**16,), "m": 2**15, "n": 8}), "bfloat16") for name, t in op.inputs.items()}
    with pytest.raises(ValueError, match=r"the examples have 2147483648 rows together, expected fewer than 2\^31"):
        bind(op, arrays)
