"""Attributes and captured numbers in JAX: no call gets the answer of another one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax as cj
from cute_ops import FLOATS, Op, Tensor
from tests.fuzz.constants import fuzz

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((8, 6)), jnp.float32)
SCALE = 2.0


def factor(out: jax.Array, of: jax.Array) -> float:
    """By which the largest element was multiplied."""
    place = int(jnp.abs(of).argmax())
    return float(out.ravel()[place] / of.ravel()[place])


def by_flag(xp: Any, acc: Any, *, flag: Any = False) -> Any:
    return acc * 10 if flag is True else acc * 5.5 if isinstance(flag, float) else acc * flag


@pytest.mark.parametrize("order", [(1, True, 1.0), (True, 1.0, 1), (1.0, 1, True)])
def test_an_epilogues_attributes_are_told_apart_by_type(order: Any) -> None:
    wanted = {int: 1.0, bool: 10.0, float: 5.5}
    for run in (lambda **a: cj.linear(X, W, **a), lambda **a: cj.rmsnorm_linear(X, None, W, **a)):
        plain = run(epilogue=by_flag, flag=1)
        for flag in (*order, *order):
            out = run(epilogue=by_flag, flag=flag)
            assert factor(out, plain) == pytest.approx(wanted[type(flag)], rel=1e-5)


@cj.fused
def times(xp: Any, x: Any, *, k: float = 1.0) -> Any:
    return x * k


@cj.fused
def of_global(xp: Any, x: Any, bias: Any = None) -> Any:
    return x * SCALE if bias is None else x * SCALE + bias


def test_minus_zero_is_another_attribute_than_zero() -> None:
    for k in (0.0, -0.0, 0.0, -0.0):
        for run in (times, jax.jit(times, static_argnames="k") if math.copysign(1, k) > 0 else times):
            assert (jnp.signbit(run(jnp.ones((1, 2)), k=k)) == (math.copysign(1, k) < 0)).all()


class Layer:
    scale = 2.0

    def epilogue(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale


def test_captured_numbers_are_those_of_now() -> None:
    layer, plain = Layer(), X @ W.T
    for scale in (2.0, 5.0, 2.0):
        globals()["SCALE"], layer.scale = scale, scale + 1
        assert factor(of_global(X), X) == factor(of_global(X, jnp.zeros(6)), X) == scale
        assert factor(cj.linear(X, W, epilogue=layer.epilogue), plain) == pytest.approx(scale + 1, rel=1e-5)
        # What jit has traced keeps its numbers, as it does of any function; a new trace has those of now.
        assert factor(jax.jit(lambda x: of_global(x))(X), X) == scale


def reference(xp: Any, x: Any, *, k: float, flag: bool, count: int) -> Any:
    return x * k + 10.0 * count if flag is True else x * k


ROWS = Tensor("*m n", "T")
OWN = Op(
    "told_apart_in_jax", inputs={"x": ROWS}, outputs={"out": ROWS}, dtypes={"T": FLOATS}, reference=reference,
    attrs={"k": 1.0, "flag": False, "count": 1}, kernel="nowhere:K",
)  # fmt: skip


def test_a_declared_ops_attributes_are_told_apart() -> None:
    run, x = cj.register(OWN), jnp.ones((1, 2))
    for k in (0.0, -0.0, 0, 0.0, -0.0):
        for out in (run(x, k), run(x, k=k), jax.jit(lambda x, k=k: run(x, k))(x)):
            assert (jnp.signbit(out) == (math.copysign(1, k) < 0)).all()
    both = jax.jit(lambda x: (run(x, k=0.0), run(x, k=-0.0)))(x)
    assert [bool(jnp.signbit(out).any()) for out in both] == [False, True]
    for wrong in ({"k": True}, {"flag": 1}, {"count": True}, {"count": 1.0}):
        run(x, k=1.0, flag=True, count=1)
        with pytest.raises(TypeError, match="must be"):
            run(x, **wrong)


def test_random_calls_compute_what_plain_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn part; ``tests/fuzz/constants.py`` makes as many calls as one likes."""
    seed = 20261128  # the same calls in every run: a failure is the change's
    print("seed", seed)
    monkeypatch.setenv("NUMBER_OF_THE_FUZZ", "1.0")
    assert sum(fuzz("jax", 40, seed).values()) == 40
