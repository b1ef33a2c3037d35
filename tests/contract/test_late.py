"""Epilogues whose reductions depend on each other: values and gradients, and on a GPU the passes that run."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from cute_ops.testing import numpy_dtype
from tests.contract.adapters import Adapter
from tests.ops import late

# In the words of array libraries, to be computed in float64.
EXACT = {late.softmax: "softmax", late.layer_norm: "layer_norm", late.log_sum_exp: "log_sum_exp", late.total: "total"}


def exact_of(adapter: Adapter, name: str) -> Any:
    """The framework's own function."""
    if adapter.name == "torch":
        layer_norm = adapter.own.layer_norm
        return {
            "softmax": lambda acc, bias: (acc + bias).softmax(-1),
            "layer_norm": lambda acc, w, b: (layer_norm(acc, acc.shape[-1:], w, b, 1e-5), acc),
            "log_sum_exp": lambda acc: acc.logsumexp(-1, keepdim=True),
            "total": lambda acc: acc.sum(-1, keepdim=True),
        }[name]
    return {
        "softmax": lambda acc, bias: adapter.own.softmax(acc + bias),
        "layer_norm": lambda acc, w, b: (adapter.own.standardize(acc, epsilon=1e-5) * w + b, acc),
        "log_sum_exp": lambda acc: adapter.own.logsumexp(acc, **late.ROW),
        "total": lambda acc: acc.sum(**late.ROW),
    }[name]


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.on_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", EXACT, ids=lambda function: function.__name__)
def test_values_and_gradients(adapter: Adapter, function: Any, dtype: str) -> None:
    rng, exact = np.random.default_rng(0), exact_of(adapter, EXACT[function])
    n, rows = (1024, 200) if getattr(adapter, "device", "cpu") == "cuda" else (24, 6)
    shapes = (rows, 32), (n, 32), *[(n,)] * len(late.OPERANDS[function])
    drawn = [rng.standard_normal(s) / (4 if s == (n, 32) else 1) for s in shapes]
    arrays = [a.astype(numpy_dtype(dtype)) for a in drawn]
    given = list(map(adapter.array, arrays))
    linear = adapter.ours.linear
    for fused in ("auto", "never"):
        for save in ("pre", "none"):
            run = adapter.usual(partial(linear, epilogue=function, fused=fused, save=save))
            outputs, pull = adapter.vjp(run, *given)
            values = list(map(adapter.numpy, outputs))
            cotangents = [rng.standard_normal(v.shape).astype(v.dtype) for v in values]
            gradients = map(adapter.numpy, pull(*map(adapter.array, cotangents)))
            expected = adapter.exact(lambda x, w, *a: exact(x @ w.T, *a), arrays, cotangents)
            for got, wanted in zip((*values, *gradients), (*expected[0], *expected[1]), strict=True):
                # Of 16 bits the product, the result and the gradient of the product are rounded.
                error = np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted)
                assert error < (2e-6 if dtype == "float32" else 1.5 * 2.0**-8), (fused, save, error)
            rows_alone = function in (late.log_sum_exp, late.total)
            assert values[0].dtype == ("float32" if rows_alone else numpy_dtype(dtype))
    with pytest.raises(ValueError, match="no kernel computes a product and such reductions of its rows"):
        linear(*given, epilogue=function, fused="always")


def test_compiled_calls_and_dtypes(adapter: Adapter) -> None:
    def both(xp: Any, acc: Any, residual: Any) -> Any:
        return xp.astype(acc + residual, "float32"), xp.astype(acc, residual.dtype)

    rng, linear = np.random.default_rng(0), adapter.ours.linear
    drawn = ((6, 32), "bfloat16"), ((24, 32), "bfloat16"), ((6, 24), "float16"), ((24,), "float32")
    x, weight, residual, bias = (adapter.array(rng.standard_normal(shape), dtype) for shape, dtype in drawn)
    outputs = linear(x, weight, residual, epilogue=both)
    assert [adapter.dtype(out) for out in outputs] == ["float32", "float16"]
    for function, operand in ((both, residual), (late.softmax, bias)):
        run = partial(linear, epilogue=function)
        for out, wanted in zip(adapter.compiled(run)(x, weight, operand), run(x, weight, operand), strict=True):
            adapter.same(out, wanted)
