"""Functions of tiles of several dtypes, outputs that say theirs, and gradients of what is expanded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.ops.expression.call import DTYPES
from cute_ops.testing import numpy_dtype
from tests.contract.adapters import Adapter, as_tuple
from tests.ops import mixing
from tests.ops.mixing import Mixed


def named(mixed: Mixed) -> str:
    return f"{mixed.op.name[:-13]}_{mixed.letters}"


def arrays_of(mixed: Mixed, rows: tuple[int, ...] = (3, 4), n: int = 24) -> list[np.ndarray]:
    """Tiles of the drawn dtypes; a row vector and an expanded tile in bfloat16."""
    rng, letters, found = np.random.default_rng(0), iter(mixed.letters), []
    for kind in mixing.FUNCTIONS[mixed.function].replace("2t", "T"):
        shape = (n,) if kind == "r" else (rows[0], 1, n) if kind == "e" else (*rows, n * (1 + (kind == "T")))
        dtype = DTYPES[next(letters)] if kind in "tT" else "bfloat16"
        found.append(rng.standard_normal(shape).astype(numpy_dtype(dtype)))
    return found


def check(adapter: Adapter, mixed: Mixed, given: Sequence[np.ndarray]) -> None:
    """Outputs and gradients against float64, by the tolerance rule, where the operands have these dtypes."""
    op, function = mixed.op, adapter.ours.fused(mixed.function)
    outputs, pull = adapter.vjp(function, *map(adapter.array, given))
    values = list(map(adapter.numpy, outputs))
    wide = [np.broadcast_to(a, values[0].shape) if mixing.is_expanded(a) else a for a in given]
    arrays = dict(zip(op.inputs, wide, strict=True))
    testing.check(op, arrays, {}, tuple(values))
    cotangents = [np.cos(v.astype(np.float32)).astype(v.dtype) for v in values]
    found = list(map(adapter.numpy, pull(*map(adapter.array, cotangents))))
    assert [a.dtype for a in found] == [a.dtype for a in given]
    known = arrays | dict(zip(op.outputs, values, strict=True))
    known |= {f"d{name}": c for name, c in zip(op.outputs, cotangents, strict=True)}
    gradients = dict(zip((f"d{name}" for name in op.inputs), found, strict=True))
    for name, out in op.handed_on.items():
        np.testing.assert_array_equal(gradients[f"d{name}"], known[f"d{out}"].astype(gradients[f"d{name}"].dtype))
    if not any(map(mixing.is_expanded, given)):
        read = {name: known[name] for name in op.grad.inputs}
        declared = testing.run_reference(op.grad, read, {})
        results = [
            None if d is None else gradients[n].astype(d.dtype) for n, d in zip(op.grad.outputs, declared, strict=True)
        ]
        testing.check(op.grad, read, {}, tuple(results))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("mixed", [*mixing.drawn(1, 18)], ids=named)
def test_values_and_gradients(adapter: Adapter, mixed: Mixed) -> None:
    check(adapter, mixed, arrays_of(mixed))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [24, 97, 1032, 4096])
@pytest.mark.parametrize("mixed", [*mixing.drawn(2, 27)], ids=named)
def test_values_and_gradients_on_a_gpu(adapter: Adapter, mixed: Mixed, n: int) -> None:
    check(adapter, mixed, arrays_of(mixed, (5, 7), n))


@pytest.mark.parametrize("way", ["plain", "compiled", "vmap"])
def test_outputs_have_the_dtypes_that_the_function_says(adapter: Adapter, way: str) -> None:
    function = adapter.ours.fused(mixing.momentum)
    run = function if way == "plain" else getattr(adapter, way)(function)
    x, y, z = (adapter.array(np.ones((3, 8)), dtype) for dtype in ("bfloat16", "float32", "float16"))
    assert [adapter.dtype(out) for out in run(x, y, z)] == ["float32", "float16"]
    assert [adapter.dtype(out) for out in run(x, x, x)] == ["bfloat16", "bfloat16"]


def test_a_log_sum_exp_of_16_bits_is_as_right_as_one_of_32(adapter: Adapter) -> None:
    def log_sum_exp(xp, x):
        top = xp.max(x, **mixing.ROW)
        return top + xp.log(xp.sum(xp.exp(x - top), **mixing.ROW))

    x = np.random.default_rng(0).standard_normal((4, 512)).astype(numpy_dtype("bfloat16"))
    out = adapter.numpy(adapter.ours.fused(log_sum_exp)(adapter.array(x)))
    assert (out.dtype, out.shape) == (np.float32, (4, 1))
    np.testing.assert_allclose(out, np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "compiled", "functional"])
def test_gradients_of_what_is_expanded_are_rounded_once(adapter: Adapter, way: str) -> None:
    def modulate(xp, x, scale, shift):
        return x * (1 + scale) + shift

    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(s) for s in ((2, 2048, 16), (2, 1, 16), (2, 1, 1), (2, 2048, 16))]
    x, scale, shift, cotangent = (a.astype(numpy_dtype("bfloat16")) for a in drawn)
    wide = cotangent.astype(np.float64)
    exact = (wide * x.astype(np.float64)).sum(1, keepdims=True), wide.sum((1, 2), keepdims=True)
    function = adapter.ours.fused(modulate)
    run = adapter.compiled(function) if way == "compiled" else function
    given = [adapter.array(a) for a in (x, scale, shift)]
    if way == "functional":
        factor = adapter.array(cotangent, "float32")
        loss = adapter.grad(lambda *given: (run(*given) * factor).sum(), (0, 1, 2))
        gradients = [*map(adapter.numpy, loss(*given))][1:]
    else:
        _, (_, *gradients) = adapter.value_and_gradients(run, given, [cotangent])
    for gradient, wanted in zip(gradients, exact, strict=True):
        # Not more than the rounding, and what sums in float32 lose.
        assert gradient.dtype == numpy_dtype("bfloat16")
        np.testing.assert_allclose(gradient.astype(np.float64), wanted, rtol=2.0**-8, atol=1e-4)
    (batched,) = as_tuple(adapter.vmap(function)(*(a[:, None] for a in given)))
    np.testing.assert_array_equal(adapter.numpy(batched[:, 0]), adapter.numpy(function(*given)))
