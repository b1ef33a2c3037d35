"""Every primitive at NaN, infinities, zeros, subnormal and the largest numbers, in the kernels' arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops import Op, fused, testing
from cute_ops.expressions import differentiate, evaluate, trace
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.jit.layout import Memory as Place
from cute_ops.jit.layout import compact
from cute_ops.ops import MODELS, PARTS
from cute_ops.testing import kernel_calls
from tests.ops import special

TABLE = special.primitives(None, None)


def test_every_primitive_is_swept() -> None:
    """But for those that look at groups of columns, the maximum of which is tested below."""
    found: set[str] = set()
    for primitive in TABLE.values():
        expression = trace(primitive.ours, dict.fromkeys(primitive.operands, "*m n"))
        nodes = [*expression.nodes, *differentiate(expression).expression.nodes]
        found |= {node.primitive for node in nodes}
    assert {*PRIMITIVES} - found == {"rotate_half", "group_sum", "group_max", "astype"}


def calls_of(primitive: special.Primitive, dtype: str) -> list[tuple[Op, dict[str, np.ndarray]]]:
    """The op and its gradient, with special numbers."""
    op = fused(primitive.ours, operands=dict.fromkeys(primitive.operands, "*m n"), name="special")
    arrays = [special.ROWS] if primitive.rows else special.pairs(len(primitive.operands))
    given = {name: testing.as_dtype(a, dtype) for name, a in zip(op.inputs, arrays, strict=True)}
    outputs = dict(zip(op.outputs, testing.run_reference(op, given, {}), strict=True))
    known = given | outputs | {f"d{name}": np.full_like(out, 1.5) for name, out in outputs.items()}
    assert op.grad is not None
    return [(op, given), (op.grad, {name: known[name] for name in op.grad.inputs})]


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TABLE)
def test_kernels_compute_the_reference(name: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        for op, given in calls_of(TABLE[name], dtype):
            where = {each: Place(compact(array.shape)) for each, array in given.items()}
            got = kernel_calls.run(kernel_calls.Call(op, given, where, {}, name, lambda _: {}))
            read = [array for each, array in given.items() if each in ("x", "y", "z")]
            for output, found, wanted in zip(op.outputs, got, testing.run_reference(op, given, {}), strict=True):
                wrong = special.differ(
                    found, np.broadcast_to(wanted, found.shape), 1e-4 if dtype == "float32" else 2e-2
                )
                if not TABLE[name].rows:
                    wrong &= ~special.is_subnormal(*read)
                assert not wrong.any(), f"{name} {output} at {[a[wrong.any(-1)][:3] for a in read]}: {found[wrong][:5]}"


def gradients(function: Any, *arrays: Any) -> list[Any]:
    """For the cotangent 1, in NumPy."""
    names = ("x", "y", "z")[: len(arrays)]
    found = differentiate(trace(function, dict.fromkeys(names, "*m n")))
    given = [arrays[s.position] if s.role == "operand" else np.ones_like(arrays[0]) for s in found.sources]
    with np.errstate(all="ignore"):
        return [np.broadcast_to(g, arrays[0].shape) for g in evaluate(found.expression, np, given)]


def test_what_is_chosen_where_frameworks_differ() -> None:
    nan, one, inf = (np.full((1, 2), x, np.float32) for x in (np.nan, 1.0, np.inf))
    for primitive in ("minimum", "maximum"):  # as torch: both get all of it; JAX gives none to both
        for x, y in ((nan, one), (one, nan), (nan, nan)):
            found = gradients(lambda xp, x, y, primitive=primitive: getattr(xp, primitive)(x, y), x, y)
            assert all((g == 1).all() for g in found)
    (found,) = gradients(lambda xp, x: xp.relu(x), nan)
    assert (found == 1).all()
    (found,) = gradients(lambda xp, x: xp.clip(x, 1.0, 2.0), one)
    assert (found == 1).all()
    (found,) = gradients(lambda xp, x: xp.gelu_tanh(x), one * np.float32(2.0**64))
    assert (found == 1).all()
    for function in (lambda xp, x: xp.sign(x), lambda xp, x: xp.gelu(x) - xp.gelu(x) * 0.5):
        (out,) = evaluate(trace(function, {"x": "*m n"}), np, [nan])
        assert np.isnan(out).all()
    (out,) = evaluate(trace(lambda xp, x: xp.gelu(x), {"x": "*m n"}), np, [inf])
    assert np.isinf(out).all()
    assert np.isnan(gradients(lambda xp, x: abs(x), nan)[0]).all()


@pytest.mark.parametrize("k", [-1, -2, -3, -5, -8])
def test_gradients_of_negative_powers(k: int) -> None:
    x = special.NUMBERS[None]
    (found,) = gradients(lambda xp, x: x**k, x)
    with np.errstate(all="ignore"):
        wanted = k * np.power(x.astype(np.float64), k - 1)
        exact = np.where(np.abs(wanted) > special.LARGEST, np.sign(wanted) * np.inf, wanted).astype(np.float32)
    wrong = special.differ(found, exact) & ~(special.is_subnormal(x) | special.is_subnormal(exact))
    assert not wrong.any(), special.told(f"power {k}", "dx", wrong, [x], found, exact)


def test_a_nan_reaches_all_gradients_of_its_group() -> None:
    x = np.array([[1.0, np.nan] + [0.5] * 14 + [2.0] * 16], np.float32)
    (found,) = gradients(lambda xp, x: xp.group_max(x, 16), x)
    assert np.isnan(found[:, :16]).all() and (found[:, 16:] == 1 / 16 * 16).all()


@pytest.mark.parametrize(("n", "layout"), [(7, "compact"), (97, "compact"), (1031, "compact"), (2, "spaced")])
def test_the_predicted_class_of_rows_of_infinities(n: int, layout: str) -> None:
    """It is the first of the largest logits, also where elements before the row in its vector, or those behind a row of
    NaN, are no smaller.
    """
    op = next(op for op in PARTS + MODELS if op.name == "cross_entropy_metrics")
    call = kernel_calls.made(op, 9, n, "bfloat16", layout, np.random.default_rng(n))
    logits = call.arrays["logits"]
    assert logits is not None
    logits[6] = np.nan
    logits[:3], logits[3, : n // 2], logits[4, n - 1], logits[5, 2:4] = -np.inf, -np.inf, np.inf, np.inf
    with np.errstate(all="ignore"):
        got = dict(zip(op.results, kernel_calls.run(call), strict=True))
        wanted = dict(zip(op.outputs, testing.run_reference(op, call.arrays, call.attrs), strict=True))
    assert np.array_equal(got["predicted"], wanted["predicted"])
