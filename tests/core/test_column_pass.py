"""Tiles and sums of columns in one pass: the kernel's arithmetic on NumPy arrays, and what the compiler makes of it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op, fused_linear
from cute_ops.autotune.dispatch import choose
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse
from cute_ops.ops.expression.formula import FEW_ROWS, FEW_ROWS_OF_TILES
from cute_ops.ops.gemm.named import linear_gelu
from cute_ops.ops.gemm.sums import column_sum
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS, interpreted
from cute_ops.tools import sass


def scaled(xp: Any, acc: Any, scale: Any, bias: Any) -> Any:
    return xp.silu(acc * scale) + bias


def gated(xp: Any, acc: Any, bias: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n] + bias[..., :n]) * (acc[..., n:] + bias[..., n:])


def tanh_of_scale(xp: Any, acc: Any, scale: Any) -> Any:
    return xp.tanh(acc * scale)


def first_step(op: Op) -> Op:
    return next(step for step in op.steps if "_bwd" in step.name)


GELU = first_step(linear_gelu)
TWO = first_step(fused_linear(scaled, operands={"scale": "n", "bias": "n"}, name="column_pass_two"))
PACKED = first_step(fused_linear(gated, operands={"bias": "2n"}, weight="2n k", name="column_pass_packed"))
SCALAR = fused_linear(tanh_of_scale, operands={"scale": ""}, name="column_pass_scalar").steps[1]
# By name: the op, and the outputs that are written.
OPS = {
    "column_sum": column_sum(),
    "gelu": GELU,
    "bias alone": GELU.only("dbias"),
    "two": TWO,
    "packed": PACKED,
    "scalar": SCALAR,
}


def test_one_pass_gives_the_tile_and_the_sums() -> None:
    """Of what an activation's gradient is, and what a bias's."""
    assert [*GELU.outputs] == ["dacc", "dbias"] and [*TWO.outputs] == ["dacc", "dscale", "dbias"]
    assert [*PACKED.outputs] == ["dacc", "dbias"] and [*SCALAR.outputs] == ["dscale"]
    assert [step.name for step in linear_gelu.steps] == [
        "linear_gelu_bwd", "linear_of_dacc_dx", "linear_of_dacc_dweight"
    ]  # fmt: skip


@pytest.mark.drawn(0.35)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_any_size_layout_and_dtype(name: str) -> None:
    """Rows of whole vectors and others, more rows than threads and fewer, neighbouring ones and strided ones."""
    seed = int.from_bytes(name.encode()[:4], "little")
    rng = np.random.default_rng(seed)
    sizes = [(1, 8), (300, 264), (1000, 8), (9, 20), (17, 999), (3, 2600), (FEW_ROWS, 136), (FEW_ROWS_OF_TILES, 264)]
    sizes += [(int(rng.integers(1, 600)), int(8 * rng.integers(1, 60))) for _ in range(2)]
    for i, (rows, n) in enumerate(sizes):
        dtype = ("bfloat16", "float32", "float16")[i % 3]
        call = kernel_calls.made(OPS[name], rows, n, dtype, LAYOUTS[i % len(LAYOUTS)], rng)
        kernel_calls.check(call)


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPS if name != "packed"])
def test_rows_that_start_anywhere_are_taken_several_at_a_time(name: str) -> None:
    """Rows of every length beside a vector's, as many as are whole vectors together, some more, and fewer."""
    seed = int(os.environ.get("CUTE_OPS_SEED", 0))
    print("seed", seed)
    rng = np.random.default_rng((seed, *name.encode()))
    for dtype, most in (("bfloat16", 300), ("float32", 40), ("float16", 7), ("bfloat16", 40)):
        rows, n = int(rng.integers(1, most)), int(8 * rng.integers(1, 150) + rng.integers(1, 8))
        kernel_calls.check(kernel_calls.made(OPS[name], rows, n, dtype, "compact", rng))


def kernel_of(op: Op, rows: int, n: int, dtype: str = "bfloat16", **sizes: int) -> Any:
    given = {key: Array(t.of({"m": (rows,), "n": n}), dtype) for key, t in op.inputs.items() if "k" not in t.shape}
    variant = choose(bind(op, given), {}, parse("sm_90a")).variant
    with interpreted():
        return variant, importlib.import_module("cute_ops.kernels.rows.pointwise").FusedPointwise(variant)


def test_which_passes_there_are() -> None:
    """Compact rows are whole vectors, alone or several together; others that do not start on half a vector take a pass
    for the tiles, whose loads are whole vectors all the same.
    """
    for n, fold in ((5120, 1), (5124, 2), (5122, 4), (5121, 8)):
        variant, kernel = kernel_of(GELU, 8224, n)
        assert (kernel.together, kernel.column_pass.fold, kernel.column_pass.vec) == (True, fold, 8)
        assert variant.tensors["dbias_partials"].shape[0] is None
    for n, together in ((5120, True), (5124, True), (5121, False)):
        _, kernel = kernel_of(PACKED, 8224, n)
        assert kernel.together == together and kernel.column_pass.fold == 1
    _, kernel = kernel_of(column_sum(), 8224, 5120)
    assert (kernel.column_pass.vec, kernel.column_pass.width, kernel.column_pass.unroll) == (8, 32, 8)
    _, kernel = kernel_of(column_sum(), 8224, 24)
    assert (kernel.column_pass.vec, kernel.column_pass.width) == (8, 4)
    for op, rows in ((column_sum(), FEW_ROWS), (GELU, FEW_ROWS_OF_TILES), (TWO, FEW_ROWS_OF_TILES)):
        for n in (8, 24, 5120):  # one CTA for all rows: no workspace, no other kernel
            variant, kernel = kernel_of(op, rows, n)
            assert kernel.alone and "dbias_partials" not in variant.tensors
            assert kernel.together == (op is not column_sum())
    others = ((GELU, 33, 5120), (PACKED, 9, 5120), (SCALAR, 9, 5120), (column_sum(), 9, 5121), (column_sum(), 257, 8))
    assert not any(kernel_of(*call)[1].alone for call in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["column_sum", "gelu"])
@pytest.mark.parametrize("n", [5120, 5121])
def test_loads_are_whole_vectors_in_flight_together(name: str, n: int, tmp_path: Path) -> None:
    variant, _ = kernel_of(OPS[name], 8224, n)
    path = tmp_path / "kernel.cubin"
    worker.compile(variant, path)
    (found,) = (each for each in sass.resources(path) if "ColumnPass" in each.kernel)
    # Four CTAs of 256 threads share an SM.
    assert found.registers <= 64 and (found.stack, found.local) == (0, 0)
