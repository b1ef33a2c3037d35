"""Group norm in both frameworks against torch's in float64: drawn shapes, dtypes, channels first and last."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cute_ops import Op, testing
from cute_ops.composite import group_norm
from cute_ops.ops.norm import group_norm as steps
from cute_ops.testing import EPS
from tests.contract.adapters import Adapter

SEED = int(os.environ.get("CUTE_OPS_SEED", "43"))


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_no_example_and_nothing_to_normalise(adapter: Adapter, last: bool) -> None:
    def ours(*shape: int) -> Any:
        shape = (shape[0], *shape[2:], shape[1]) if last else shape
        return adapter.ours.group_norm(adapter.array(np.ones(shape, np.float32)), groups=2, channels_last=last)

    for positions in ((), (3,), (2, 3), (2, 3, 2)):
        assert sorted(ours(0, 4, *positions).shape) == sorted((0, 4, *positions))
    with pytest.raises(ValueError, match=r"^cute\.group_norm: argument `x` has c=0, expected at least one channel"):
        ours(2, 0, 3)
    with pytest.raises(ValueError, match=r"^cute\.group_norm: argument `x` has s=0, expected at least one position"):
        ours(2, 4, 0)


@pytest.mark.drawn(0.5)
@pytest.mark.on_gpus
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("number", range(4))
def test_values_and_gradients(adapter: Adapter, number: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one with groups that no chip holds, and SiLU."""
    long = number % 2 == 1
    if long:
        monkeypatch.setattr(group_norm, "LONG", 0)
    torch = pytest.importorskip("torch")
    print("seed", SEED)
    rng = np.random.default_rng((SEED, number, last))
    groups, each = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    positions = tuple(int(n) for n in rng.integers(1, 12, number))
    channels, dtype = groups * each, ("float32", "bfloat16", "float16")[number % 3]
    shape = (3, channels, *positions)
    kind = testing.numpy_dtype(dtype)
    # A mean that is large beside the deviations from it.
    x, dout = (rng.standard_normal(shape) + m for m in (20.0, 0.0))
    x, dout = x.astype(kind), dout.astype(kind)
    parameters = [rng.standard_normal(channels).astype(np.float32) for _ in range(2)]
    given = parameters[: number % 3 if number < 3 else 2]
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, *given)]
    exact = torch.nn.functional.group_norm(leaves[0], groups, *leaves[1:], eps=1e-3)
    exact = torch.nn.functional.silu(exact) if long else exact
    wanted = [exact.detach().numpy()]
    wanted += [g.numpy() for g in torch.autograd.grad(exact, leaves, torch.from_numpy(dout.astype(np.float64)))]

    activation = "silu" if long else "none"

    def ours(x: Any, *given: Any) -> Any:
        return adapter.ours.group_norm(x, *given, groups=groups, eps=1e-3, channels_last=last, activation=activation)

    def moved(a: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(a, 1, -1)) if last and a.ndim == len(shape) else a

    arrays = [adapter.array(moved(a)) for a in (x, *given)]
    values, slopes = adapter.value_and_gradients(adapter.usual(ours), arrays, [moved(dout)])
    for got, right in zip((*values, *slopes), wanted, strict=True):
        right = moved(right)
        unit, scale = EPS[str(got.dtype)], max(1.0, np.abs(right).max())
        assert got.shape == right.shape
        assert np.abs(got.astype(np.float64) - right).max() <= 8 * max(unit, 20 * EPS["float32"]) * scale


def test_programs_and_batches(adapter: Adapter) -> None:
    """Compiled and under vmap a call is what it is; no example is no error."""
    rng = np.random.default_rng(0)
    for last in (False, True):
        x = rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
        weight = adapter.array(rng.standard_normal(4).astype(np.float32))

        def run(x: Any, weight: Any = weight, last: bool = last) -> Any:
            return adapter.ours.group_norm(x, weight, groups=2, channels_last=last)

        each = [adapter.numpy(run(adapter.array(a))) for a in x]
        compiled, mapped = adapter.compiled(run)(adapter.array(x[0])), adapter.vmap(run)(adapter.array(x))
        np.testing.assert_allclose(adapter.numpy(compiled), each[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(adapter.numpy(mapped), np.stack(each), rtol=1e-5, atol=1e-5)
        assert run(adapter.array(x[0, :0])).shape == (0, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_gradients_of_batches(adapter: Adapter, last: bool) -> None:
    """Under vmap each example has the gradients of a call of its own: equinox maps modules over examples."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 2, 5, 4) if last else (3, 2, 4, 5)).astype(np.float32)
    weight, bias = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal(4).astype(np.float32)

    def loss(x: Any, weight: Any, bias: Any) -> Any:
        out = adapter.ours.group_norm(x, weight, bias, groups=2, channels_last=last, activation="silu")
        return (out * out).sum()

    slopes = adapter.grad(loss, (0, 1, 2))
    mapped = adapter.vmap(slopes, (0, 0, None))(*map(adapter.array, (x, weight, bias)))
    each = [slopes(*map(adapter.array, (x[i], weight[i], bias))) for i in range(3)]
    for i, got in enumerate(mapped):
        alone = np.stack([adapter.numpy(one[i]) for one in each])
        np.testing.assert_allclose(adapter.numpy(got), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((6,), {}, "argument `x` has 1 dims, expected at least 2"),
        ((2, 6, 3), {"groups": 4}, "attribute `groups` is 4, expected a divisor of the c=6 channels"),
        ((2, 6, 0), {"groups": 2}, "argument `x` has s=0, expected at least one position"),
    ],
)  # fmt: skip
def test_what_is_refused(adapter: Adapter, shape: tuple[int, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        adapter.ours.group_norm(adapter.array(np.ones(shape, np.float32)), **options)


@pytest.mark.parametrize("op", [group_norm.group_norm_long, group_norm.group_norm_last], ids=lambda op: op.name)
def test_gradients_share_their_sums(op: Op) -> None:
    """One step computes the sums over x and dout, and whichever gradients are wanted read them."""
    sums = steps.group_norm_row_slopes, steps.group_norm_slopes
    having = [step for step in op.steps if step.program and any(each in step.program.ops for each in sums)]
    assert len(having) == 1
