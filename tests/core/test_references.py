"""Every backward reference against the vector-Jacobian product of its forward reference, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cute_ops import FLOATS, Case, Op, Tensor, testing
from cute_ops.ops import OPS
from cute_ops.tools import gradient

SMALL = [(op, case) for op in OPS if op.grad for case in op.cases if testing.elements(case) <= 20000]


@pytest.mark.parametrize(("op", "case"), SMALL, ids=lambda v: v.name)
def test_gradient(op: Op, case: Case) -> None:
    torch = pytest.importorskip("torch")  # here: of pytest's processes, one may do
    attrs = testing.attributes(op, case)
    arrays = testing.in_float64(testing.inputs(op, case, "float32"))
    tensors = {
        n: None if a is None else torch.from_numpy(a).requires_grad_(n in op.differentiable) for n, a in arrays.items()
    }
    raw = testing.run_reference(op, tensors, attrs)
    outputs = dict(zip(op.shown, testing.differentiated(op, tensors, raw, attrs), strict=True))
    outputs = {n: y for n, y in outputs.items() if y.is_floating_point()}
    rng = np.random.default_rng(1)
    cotangents = {n: torch.from_numpy(rng.standard_normal(tuple(y.shape))) for n, y in outputs.items()}
    wanted = {n: t for n, t in tensors.items() if t is not None and n in op.differentiable}
    exact = torch.autograd.grad(list(outputs.values()), list(wanted.values()), list(cotangents.values()))
    got = gradient.backward(op, tensors, raw, cotangents, attrs)
    for name, expected in zip(wanted, exact, strict=True):
        torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-9)
    gradient.check(op, testing.small(case, op=op))


def declared(forward: Callable[..., Any], backward: Callable[..., Any]) -> Op:
    """``out = forward(xp, x, w)``, whose gradients ``backward(xp, x, w, dout)`` gives."""
    inputs = {"x": Tensor("*m n", "T"), "w": Tensor("n", "T")}
    common: dict[str, Any] = {"dtypes": {"T": FLOATS}, "kernel": "a:B"}
    grad = Op(
        "mine_bwd", inputs={**inputs, "dout": inputs["x"]}, outputs={f"d{n}": t for n, t in inputs.items()},
        reference=backward, **common,
    )  # fmt: skip
    return Op("mine", inputs=inputs, outputs={"out": inputs["x"]}, reference=forward, grad=grad, **common)


def products(xp: Any, x: Any, w: Any) -> Any:
    return x * w


def gradients(xp: Any, x: Any, w: Any, dout: Any) -> tuple[Any, Any]:
    return dout * w, xp.sum(dout * x, axis=tuple(range(x.ndim - 1)))


def but_one(xp: Any, x: Any, w: Any, dout: Any) -> tuple[Any, Any]:
    dx, dw = gradients(xp, x, w, dout)
    dx[1, 2] = 0
    return dx, dw


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a factor": (lambda xp, *given: (-3 * gradients(xp, *given)[0], gradients(xp, *given)[1]), "`x` by mine_bwd is -?"),
    "one of a thousand": (lambda xp, *given: (gradients(xp, *given)[0], 1.001 * gradients(xp, *given)[1]), "`w` by"),
    "one element": (but_one, "`x` by"),
    "one row's sum": (lambda xp, x, w, dout: (dout * w, (dout * x)[0]), "`w` by"),
    "zeros": (lambda xp, x, w, dout: (dout * 0, gradients(xp, x, w, dout)[1]), "`x` by mine_bwd is 0 along a random "),
    "not a number": (lambda xp, x, w, dout: (dout * w, w * xp.nan), "`w` by mine_bwd is nan along a random"),
    "another shape": (
        lambda xp, x, w, dout: (dout * w, dout * x), r"`w` by mine_bwd has the shape \(3, 8\), expected \(8,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_gradient_is_found(wrong: str) -> None:
    case = Case("small", {"m": (3,), "n": 8})
    gradient.check(declared(products, gradients), case)
    reference, message = WRONG[wrong]
    with pytest.raises(AssertionError, match=f"^mine: the gradient of {message}"):
        gradient.check(declared(products, reference), case)


def test_a_reference_with_too_many_outputs_is_named() -> None:
    with pytest.raises(TypeError, match="its reference returned 2 outputs, declared are 1"):
        gradient.check(declared(lambda xp, x, w: (x, w), gradients), Case("small", {"m": (3,), "n": 8}))


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (lambda xp, x: abs(x), lambda xp, x: xp.sign(x)),
        (lambda xp, x: xp.maximum(x, x * 0) ** 2, lambda xp, x: 2 * xp.maximum(x, x * 0)),
        (lambda xp, x: xp.log(x), lambda xp, x: 1 / x),
        (lambda xp, x: xp.sqrt(x), lambda xp, x: 0.5 / xp.sqrt(x)),
        (lambda xp, x: xp.tanh(100 * x), lambda xp, x: 100 * (1 - xp.tanh(100 * x) ** 2)),
    ],
    ids=["abs", "relu2", "log", "sqrt", "steep"],
)
def test_kinks_and_poles_are_no_wrong_gradients(
    function: Callable[[Any, Any], Any], slope: Callable[[Any, Any], Any]
) -> None:
    """Of a thousand numbers some lie nearer to a kink than a long step is, and half have no logarithm."""
    op = declared(
        lambda xp, x, w: function(xp, x) + w,
        lambda xp, x, w, dout: (dout * slope(xp, x), xp.sum(dout, axis=tuple(range(x.ndim - 1)))),
    )
    for seed in range(50):
        gradient.check(op, Case("small", {"m": (16,), "n": 65}), seed)


def test_the_tolerance_rule_rejects_a_wrong_result() -> None:
    op = OPS[0]
    case = Case("small", {"m": (8,), "n": 256})
    arrays, attrs = testing.inputs(op, case, "bfloat16"), testing.attributes(op, case)
    (right,) = testing.run_reference(op, arrays, attrs)
    assert right is not None
    testing.check(op, arrays, attrs, (right,))
    wrong = right.copy()
    wrong[3, 5] *= 1.03
    with pytest.raises(AssertionError, match=r"rmsnorm: output out: error .* exceeds .* at \(3, 5\)"):
        testing.check(op, arrays, attrs, (wrong,))
    poisoned = right.copy()
    poisoned[0, 0] = np.nan
    with pytest.raises(AssertionError, match="NaN"):
        testing.check(op, arrays, attrs, (poisoned,))


@pytest.mark.parametrize("block", [0, 128])
def test_fp8_scales(block: int) -> None:
    """What the docstring says of zeros, NaN, infinities, tiny rows and the last block."""
    quantize = next(op for op in OPS if op.name == "quantize_fp8")
    x = np.zeros((5, 200), np.float32)
    x[0] = np.linspace(-3, 3, 200)
    x[1, 3], x[1, 4], x[1, 150] = 7, np.nan, 14
    x[2, :4] = [np.inf, -np.inf, -2, 1]
    x[3] = 1e-40
    out, scale = quantize.reference(np, x, block=block)
    wide = out.astype(np.float32)
    assert out.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == np.float32
    assert scale.shape == (5, 2 if block else 1)
    # The largest of a row or block becomes 448; a smaller number loses half a unit of four bits at most.
    assert abs(wide[0, 0]) == abs(wide[0, -1]) == 448
    error = np.abs(wide[0] * (np.repeat(scale[0], 128)[:200] if block else scale[0]) - x[0])
    assert np.all(error <= np.maximum(np.abs(x[0]) / 16, 2.0**-10 * scale[0].max()) * (1 + 1e-6))
    assert np.isnan(wide[1, 4]) and np.isnan(wide).sum() == 1
    assert list(wide[1, [3, 150]]) == ([448, 448] if block else [224, 448])
    assert list(wide[2, :4]) == [448, -448, -448, 224] and scale[2, 0] == np.float32(2 / 448)
    assert scale[3, 0] == np.float32(2.0**-126)
    assert not wide[4].any() and np.all(scale[4] == 1)
    testing.check(quantize, {"x": x}, {"block": block}, (out, scale))
    wrong = out.copy()
    wrong[0, 77] = np.float32(wide[0, 77]) * 1.5
    with pytest.raises(AssertionError, match=r"output out: error .* at \(0, 77\)"):
        testing.check(quantize, {"x": x}, {"block": block}, (wrong, scale))


@pytest.mark.fault(
    "GELU of numbers far below zero, where `1 + erf` loses all digits",
    "the reference, the kernel and the tolerance keep them", "nothing",
)  # fmt: skip
def test_gelu_far_below_zero() -> None:
    gelu = next(op for op in OPS if op.name == "gelu")
    x = -np.linspace(0.5, 12, 64, dtype=np.float32)[None]
    (low,), (exact,) = (
        testing.run_reference(gelu, {"x": a}, {"approximate": "none"}) for a in (x, x.astype(np.float64))
    )
    by_hand = [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x[0].tolist()]
    np.testing.assert_allclose(exact[0], by_hand, rtol=1e-12)
    np.testing.assert_allclose(low[0], by_hand, rtol=5e-5)  # of the exponent, x^2 / 2, rounded to float32


@pytest.mark.parametrize("slots", [[5, -1, 2, 5, 6, -7, 2, 5], [9] * 8, [-1] * 8, [*range(8)], []], ids=str)
def test_of_tokens_with_one_slot_the_last_one_stays(slots: list[int]) -> None:
    """In the reference; negative slots and those past the last one name no place."""
    op = next(op for op in OPS if op.name == "append_kv")
    rng = np.random.default_rng(0)
    caches = [rng.standard_normal((3, 2, 2, size)).astype(np.float32) for size in (4, 3)]
    new = [rng.standard_normal((len(slots), *cache.shape[2:])).astype(np.float32) for cache in caches]
    expected = [cache.copy() for cache in caches]
    for token, slot in enumerate(slots):
        for cache, rows in zip(expected, new, strict=True):
            if 0 <= slot < 6:
                cache.reshape(6, *cache.shape[2:])[slot] = rows[token]
    got = op.reference(np, *caches, *new, np.array(slots, np.int64), interleaved=False)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
