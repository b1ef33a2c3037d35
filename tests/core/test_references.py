"""Every backward reference against the vector-Jacobian product of its forward reference, in float64."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cute_ops import Case, Op, testing
from cute_ops.ops import OPS

torch = pytest.importorskip("torch")
SMALL = [(op, case) for op in OPS if op.grad for case in op.cases if testing.elements(case) <= 20000]


@pytest.mark.parametrize(("op", "case"), SMALL, ids=lambda v: v.name)
def test_gradient(op: Op, case: Case) -> None:
    import array_api_compat.torch as xp

    backward = op.grad
    assert backward is not None
    attrs = testing.attributes(op, case)
    arrays = {
        n: a.astype(np.float64) if a is not None and n in op.differentiable else a
        for n, a in testing.inputs(op, case, "float32").items()
    }
    tensors = {
        n: None if a is None else torch.from_numpy(a).requires_grad_(n in op.differentiable) for n, a in arrays.items()
    }
    result = op.reference(xp, *tensors.values(), **attrs)
    outputs = dict(zip(op.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    rng = np.random.default_rng(1)
    cotangents = {f"d{n}": torch.from_numpy(rng.standard_normal(tuple(outputs[n].shape))) for n in op.shown}
    wanted = {f"d{n}": t for n, t in tensors.items() if t is not None and n in op.differentiable}
    exact = dict(
        zip(
            wanted,
            torch.autograd.grad([outputs[n] for n in op.shown], list(wanted.values()), list(cotangents.values())),
            strict=True,
        )
    )
    known = {**tensors, **outputs, **cotangents}
    gradients = backward.reference(xp, *(known.get(n) for n in backward.inputs), **attrs)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    got = dict(zip(backward.outputs, gradients, strict=True))
    for name, gradient in exact.items():
        value = got[name] if got[name] is not None else got[backward.outputs[name].same_as or ""]
        torch.testing.assert_close(value, gradient, rtol=1e-9, atol=1e-9)


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
