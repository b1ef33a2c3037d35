"""Products of few rows whose operands begin off vectors, which are read where they lie."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cute_ops import Array, Op, testing
from cute_ops.autotune import choices
from cute_ops.autotune.dispatch import fallback, realigned, to_measure
from cute_ops.declaration.binding import bind
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops.gemm.linear import linear, linear_dx, linear_float32
from cute_ops.ops.gemm.named import gated_linear, linear_add, linear_gelu
from cute_ops.testing.kernel_calls import Call
from tests.emulator import device, products
from tests.ops.epilogues import BY_NAME

TARGET = parse("sm_90a:132")


def drawn_call(op: Op, seed: int) -> Call:
    """A call of drawn lengths and places; between rows that do not follow on each other, and before the first one, is
    NaN.
    """
    rng = np.random.default_rng(seed)
    m, n = int(rng.integers(1, 25)), int(rng.integers(1, 140))
    k = 2 * int(rng.integers(0, 300)) + 1
    dims = {"m": (m,), "n": n, "k": k}
    arrays: dict[str, Any] = {}
    for name, tensor in op.inputs.items():
        arrays[name] = rng.integers(-4, 5, tensor.of(dims)).astype(ml_dtypes.bfloat16)
    where = {}
    for name in ("x", "weight"):
        gap, off = (int(rng.choice([0, rng.integers(1, 9)])) for _ in range(2))
        where[name] = Memory((k + gap + (name == "weight" and (k + gap) % 8 == 0), 1), 2 * off)
    return Call(op, arrays, where, dict(op.attrs) | {"fused": "always"}, f"{op.name} {m}x{n}x{k}", lambda seed: {})


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    "op",
    [linear, linear_float32, gated_linear, linear_gelu, linear_add, BY_NAME["saving"], BY_NAME["with_all"]],
    ids=lambda op: op.name,
)
def test_rows_begin_anywhere(op: Op, tmp_path: Path) -> None:
    """What lies beside rows is not multiplied, were it NaN; twice, with the same bits."""
    seed = secrets.randbelow(1 << 30)
    call = drawn_call(op, seed)
    config = GemmConfig.of(device.planned(call)[1].variant.config)
    print(f"seed {seed}: {call.said}, {call.where}, {config}")
    assert config.form == "in_place"
    first, second = (device.run(call, tmp_path, turn) for turn in (0, 1))
    testing.check(op, call.arrays, call.attrs, first)
    assert [a is None or a.tobytes() for a in first] == [a is None or a.tobytes() for a in second]


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_stays_in_its_row_and_column(dtype: str, tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    rng, kind = np.random.default_rng(seed), testing.numpy_dtype(dtype)
    m, n, k = int(rng.integers(2, 25)), int(rng.integers(9, 140)), 2 * int(rng.integers(1, 300)) + 1
    x, weight = (rng.integers(-4, 5, shape).astype(kind) for shape in ((m, k), (n, k)))
    x[int(rng.integers(m))] = weight[int(rng.integers(n))] = np.nan
    (out,) = device.run(Call(linear, {"x": x, "weight": weight}, {}, {"fused": "always"}, "", lambda _: {}), tmp_path)
    exact = (x.astype(np.float64) @ weight.astype(np.float64).T).astype(kind)
    np.testing.assert_array_equal(out.astype(np.float32), exact.astype(np.float32))


@pytest.mark.parametrize(
    ("op", "m", "memory", "tile"),
    [
        (linear, 1, {}, 8), (linear, 8, {}, 8), (linear, 9, {}, 16), (linear, 32, {}, 32), (linear, 33, {}, 0),
        (linear, 5, {"x": Memory((1001, 1)), "weight": Memory((1008, 1))}, 8),
        (linear, 5, {"weight": Memory((1, 33))}, 0), (linear_dx, 5, {}, 0), (linear_gelu, 5, {}, 8),
        # Groups of columns and reductions of rows are those of other kernels.
        (BY_NAME["with_rope"], 5, {}, 0), (BY_NAME["with_rstd"], 5, {}, 0), (BY_NAME["gated_saving"], 5, {}, 0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_few_rows_of_terms_are_read_in_place(op: Op, m: int, memory: dict[str, Memory], tile: int) -> None:
    dims = {"m": (m,), "n": 192 if op is BY_NAME["with_rope"] else 33, "k": 1001}
    given = {name: Array(t.of(dims), "bfloat16") for name, t in op.inputs.items()}
    config = GemmConfig.of(plan(bind(op, given), memory, TARGET).variant.config)
    assert (config.form == "in_place") == (tile > 0)
    assert not tile or config.tile_m == tile


@pytest.mark.usefixtures("cache_folder")
def test_what_was_measured_of_few_rows_is_not_that_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of up to 64 rows share what was measured, and only those of up to 32 are read in place."""
    monkeypatch.setenv("CUTE_OPS_TUNE", "1")
    given = {name: Array(shape, "bfloat16") for name, shape in (("x", (5, 1001)), ("weight", (999, 1001)))}
    few, more = bind(linear, given), bind(linear, {**given, "x": Array((40, 1001), "bfloat16")})
    call = to_measure(few, {}, TARGET)
    assert call is not None
    choices.keep(linear, call, choices.Times(10.0, 20.0))
    assert fallback(few, {}, TARGET) is None
    assert fallback(more, {}, TARGET) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "copied"),
    [
        (5, 13312, 13641, ()),
        (16, 13824, 6145, ()),
        (64, 13824, 6145, ("x", "weight")),
        (4097, 5121, 1281, ("x", "weight")),
    ],
)
def test_operands_are_read_in_place_where_copies_take_longer(m: int, n: int, k: int, copied: tuple[str, ...]) -> None:
    """Not in training, whose backward reads the copies, too."""
    given = {"x": Array((m, k), "bfloat16"), "weight": Array((n, k), "bfloat16")}
    binding, places = bind(linear, given), {name: Memory((k, 1)) for name in given}
    assert tuple(realigned(binding, places, TARGET)) == copied
    assert (fallback(binding, places, TARGET) is None) == (not copied)
    assert tuple(realigned(binding, places, TARGET, reads=2)) == ("x", "weight")
    # XLA makes copies itself.
    assert (fallback(binding, {}, TARGET, pads=True) is None) == (not copied)
