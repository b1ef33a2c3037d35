"""An op that was found by an expression runs and differentiates, alone and behind a product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.ops.expression.call import fits_of, op_of
from cute_ops.ops.gemm.by_call import Product
from tests.contract.adapters import Adapter

RNG = np.random.default_rng(0)
ROWS, N, K = (3, 4), 16, 8


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def check(adapter: Adapter, op: Op, given: list[np.ndarray], attrs: Any = ()) -> None:
    """Outputs by the tolerance rule, and gradients by differences of the reference in float64."""
    function = adapter.register(op)
    outputs, pull = adapter.vjp(lambda *arrays: function(*arrays, *attrs), *map(adapter.array, given))
    values = list(map(adapter.numpy, outputs))
    arrays = dict(zip(op.inputs, given, strict=True))
    testing.check(op, arrays, dict(zip(op.attrs, attrs, strict=True)), tuple(values))
    cotangents = [np.cos(value) for value in values]
    found = list(map(adapter.numpy, pull(*map(adapter.array, cotangents))))

    def loss(*wide: np.ndarray) -> float:
        results = op.reference(np, *wide)
        results = results if isinstance(results, tuple) else (results,)
        return float(sum((r * c).sum() for r, c in zip(results, cotangents, strict=True)))

    wide = [a.astype(np.float64) for a in given]
    for i, gradient in enumerate(found):
        step = RNG.standard_normal(gradient.shape)
        near = [[a + 1e-5 * sign * step if j == i else a for j, a in enumerate(wide)] for sign in (1, -1)]
        slope = (loss(*near[0]) - loss(*near[1])) / 2e-5
        assert float((gradient * step).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-3), (op.name, i)


def test_an_expression_of_arrays(adapter: Adapter) -> None:
    text = "e1(t,r,c) mean 0; subtract 0 3; square 4; add 1 5; multiply 2 6 -> 4 7"
    given = {"x": drawn(*ROWS, N), "shift": drawn(1, N), "scale": drawn(ROWS[1], 1)}
    specs = {key: Array(a.shape, "float32") for key, a in given.items()}
    op, fits = op_of(text, specs, name="by_its_text"), fits_of(text, specs)
    assert [fit and fit.shape for fit in fits.values()] == ["*m n", "n", "*m 1"]
    each = zip(given.values(), fits.values(), strict=True)
    broadcast = [np.broadcast_to(a.reshape(fit.own), fit.sizes) for a, fit in each if fit]
    check(adapter, op, broadcast)


def test_an_expression_behind_a_product(adapter: Adapter) -> None:
    x, weight, bias, residual = drawn(*ROWS, K), drawn(2 * N, K), drawn(2 * N), drawn(*ROWS, N)
    text = "e1(2t,2r,t) add 0[n:] 1[n:]; add 0[:n] 1[:n]; silu 4; multiply 3 5; add 2 6 -> 7"
    product = Product.of(Array(x.shape, "float32"), Array(weight.shape, "float32"), layout="2n k")
    operands = {"bias": Array(bias.shape, "float32"), "none": None, "residual": Array(residual.shape, "float32")}
    op = op_of(text, operands, product, name="gated")
    assert op.name.startswith("linear_gated_") and [*op.inputs] == ["x", "weight", "bias", "residual"]
    check(adapter, op, [x, weight, bias, residual], ("auto",))
