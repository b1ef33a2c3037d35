"""Linear layers with epilogues in both frameworks: weights without columns, batches of weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.contract.adapters import Adapter


def swiglu(xp: Any, acc: Any, bias: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n] + bias[..., :n]) * (acc[..., n:] + bias[..., n:])


def by_half(xp: Any, acc: Any, bias: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n] + bias) * acc[..., n:]


TEXT = "e1(2t,2r) add 0[:n] 1[:n]; add 0[n:] 1[n:]; multiply 2 3 -> 4"


@pytest.mark.slow
@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["linear", "rmsnorm_linear"])
def test_a_packed_weight_of_no_columns(adapter: Adapter, name: str, compiled: bool, halves: bool) -> None:
    """A bias of no columns may be one of halves, or one of a half alone."""
    shapes = (3, 8), (2, 0, 8) if halves else (0, 8), (0,)
    given = [adapter.array(np.ones(shape), "float16") for shape in shapes]
    function = getattr(adapter.ours, name)

    for epilogue in (swiglu, by_half, TEXT):

        def run(x: Any, *rest: Any, epilogue: Any = epilogue) -> Any:
            before = (None,) if name == "rmsnorm_linear" else ()
            return function(x, *before, *rest, epilogue=epilogue, packed=True, halves=halves)

        (out,), (dx, *others) = adapter.value_and_gradients(adapter.compiled(run) if compiled else run, given)
        assert out.shape == (3, 0)
        assert not dx.any() and [g.shape for g in others] == [*shapes[1:]]


@pytest.mark.parametrize("names", [("gain", "dgain"), ("dgain", "gain"), ("\u03b1", "fused"), ("operand1", "weight")])
def test_operands_of_an_epilogue_may_have_any_name(adapter: Adapter, names: tuple[str, str]) -> None:
    """That of another one's gradient, in letters of any language, of an option, of what others are called instead."""
    made: dict[str, Any] = {}
    exec(f"def epilogue(xp, acc, {', '.join(names)}): return acc * {names[0]} + {names[1]}", made)
    rng = np.random.default_rng(0)
    x, weight, gain, bias = (rng.standard_normal(shape) for shape in ((3, 8), (5, 8), (3, 5), (5,)))
    given = [adapter.array(a, "float32") for a in (x, weight, gain, bias)]
    outs, found = adapter.value_and_gradients(lambda *a: adapter.ours.linear(*a, epilogue=made["epilogue"]), given)
    product = x @ weight.T
    dproduct = np.ones_like(product) * gain
    right = product * gain + bias, dproduct @ weight, dproduct.T @ x, product, np.full(5, 3.0)
    for ours, exact in zip((*outs, *found), right, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["bias", "gelu", "swiglu", "halves"])
def test_rmsnorm_linear_of_a_batch_of_weights(adapter: Adapter, kind: str, transposed: bool, save: str) -> None:
    """The norm's weight is that of all."""
    rng, packed = np.random.default_rng(0), kind in ("swiglu", "halves")
    x, norm_weight, bias = rng.standard_normal((2, 3, 5, 8)), rng.random(8) + 0.5, rng.standard_normal((2, 3, 1, 12))
    weight = rng.standard_normal((2, 3, 2, 6, 8) if kind == "halves" else (2, 3, 12, 8)) / 3
    weight = np.moveaxis(weight, -1, 2) if transposed else weight
    given = [adapter.array(a, "float32") for a in (x, norm_weight, weight, bias)]
    one = partial(
        adapter.ours.rmsnorm_linear, epilogue=swiglu if packed else kind, transposed=transposed, save=save, eps=1e-2,
        packed=packed, halves=kind == "halves",
    )  # fmt: skip

    def total(x: Any, norm_weight: Any, weight: Any, bias: Any) -> Any:
        return adapter.loss(one(x, norm_weight, weight, bias))

    def each(x: Any, norm_weight: Any, weight: Any, bias: Any) -> Any:
        every = [(i, j) for i in range(2) for j in range(3)]
        return adapter.loss([one(x[at], norm_weight, weight[at], bias[at]) for at in every])

    (found, slopes), (wanted, exact) = (adapter.value_and_gradients(adapter.usual(f), given) for f in (total, each))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for got, right in zip(slopes, exact, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_a_bias_that_is_a_number_is_added(adapter: Adapter) -> None:
    """It is an attribute of the epilogue, whose value the op's name has to tell."""
    x, weight = (adapter.array(np.ones(shape, np.float32)) for shape in ((3, 8), (4, 8)))
    for bias in (1.0, 2.0, 3):
        for epilogue, expected in (("bias", 8.0 + bias), ("silu", (8.0 + bias) / (1 + np.exp(-8.0 - bias)))):
            found = adapter.ours.rmsnorm_linear(x, None, weight, epilogue=epilogue, bias=bias, eps=0.0)
            np.testing.assert_allclose(adapter.numpy(found), expected, rtol=1e-5)
