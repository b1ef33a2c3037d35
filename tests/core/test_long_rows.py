"""Rows of tens of thousands of elements: which kernels hold them, and these kernels' arithmetic on NumPy arrays."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op
from cute_ops.autotune.dispatch import STATIC_LIMIT, choose, limit_static
from cute_ops.declaration.binding import Binding, bind
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.ops import MODELS, OPS
from cute_ops.testing import kernel_calls

SEED = int(os.environ.get("CUTE_OPS_SEED", "37"))
BY_NAME = {op.name: op for op in (*OPS, *MODELS, *kernel_calls.ALL)}
# Lengths between which one is drawn.
LONG = {"layernorm": (33_000, 120_000), "rmsnorm": (102_401, 200_000), "silu_mul_fp8": (16_385, 65_000)}


def bound(name: str, rows: int, n: int, wide: str) -> Binding:
    """A call with weights of a dtype."""
    op = BY_NAME[name]
    dtypes = {"T": "bfloat16", "W": wide, "B": wide, "R": "bfloat16"}
    absent, sizes = {"bias"} if name.startswith("rmsnorm") else {"lse_partial"}, op.example((rows,), n)
    arrays = {
        key: None if key in absent else Array(t.of(sizes), dtypes.get(t.dtype, op.dtype_near(t, "bfloat16")))
        for key, t in op.inputs.items()
    }
    return bind(op, arrays)


def chosen(name: str, rows: int, n: int, wide: str = "float32", sms: int = 132) -> Any:
    """The config of a call with weights of a dtype, on so many SMs."""
    return choose(bound(name, rows, n, wide), {}, parse(f"sm_90a:{sms}")).variant.config


@pytest.mark.parametrize(
    ("name", "n", "wide", "form", "cluster"),
    [
        ("layernorm", 95_430, "float32", "persistent", 8), ("layernorm", 40_000, "float32", "persistent", 4),
        ("layernorm", 40_000, "bfloat16", "smem", 4), ("layernorm", 16_384, "float32", "smem", 1),
        ("rmsnorm", 160_001, "float32", "persistent", 8), ("rmsnorm", 160_001, "bfloat16", "smem", 8),
        ("rmsnorm", 60_001, "float32", "smem", 2),
        ("silu_mul_fp8", 60_001, "bfloat16", "one_pass", 8), ("silu_mul_fp8", 200_001, "bfloat16", "smem", 16),
    ],
)  # fmt: skip
def test_which_kernel_holds_a_long_row(name: str, n: int, wide: str, form: str, cluster: int) -> None:
    """As measured on an H200: wide weights of long rows stay in registers, where these have room."""
    config = chosen(name, 1000, n, wide)
    assert (config["form"], config.get("cluster", 1)) == (form, cluster)


@pytest.mark.parametrize("name", ["rmsnorm_bwd", "layernorm_bwd", "layernorm"])
def test_rows_that_start_on_a_vector_are_read_from_a_line(name: str) -> None:
    """3665 x 10680: the gradient takes 68 us where warps' accesses lie across sectors, 64 where they do not."""
    rng = np.random.default_rng(SEED)
    for n in (rng.integers(8200 // 64, 15_000 // 64, 8) * 64).tolist():
        on_a_line, beside = (chosen(name, 3000, k, "bfloat16") for k in (n, n + 8 * int(rng.integers(1, 8))))
        assert "lines" not in on_a_line
        assert (beside["lines"], beside["align_vectors"]) == (1, 8)
        assert "sort_period" not in beside


@pytest.mark.parametrize("name", ["rmsnorm_bwd", "layernorm"])
def test_rows_are_sorted_only_where_clusters_have_rows_of_several_places(name: str) -> None:
    """A gradient of 2249 x 17399 stores 127 rows of sums where its rows are sorted, 64 where they are not."""
    for n in (np.random.default_rng(SEED).integers(8500, 11_500, 8) * 2 + 1).tolist():
        config = chosen(name, 3000, n, "bfloat16")
        assert config["clusters"] % 64 == 0
        assert "sort_period" not in config
    assert chosen("layernorm", 3000, 60_001, "bfloat16")["sort_period"] > 1, "30 clusters are no multiple of the places"


@pytest.mark.parametrize("name", ["rmsnorm_bwd", "layernorm_bwd"])
@pytest.mark.parametrize("sms", [114, 78, 16])
def test_rows_that_are_read_from_a_line_are_not_sorted_on_any_gpu(name: str, sms: int) -> None:
    """On 114 SMs they were sorted: behind a row's end slots kept vectors of a row that started elsewhere."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, sms))
    limit_static(STATIC_LIMIT)
    for n in (rng.integers(1030, 3060, 24) * 8).tolist():
        config = chosen(name, 3000, n, "bfloat16", sms)
        assert config["form"] == "persistent"
        assert not (config.get("lines") and config.get("sort_period"))


@pytest.mark.parametrize("name", ["rmsnorm_bwd", "layernorm_bwd"])
def test_whole_vectors_that_are_read_from_a_line_cannot_be_sorted(name: str) -> None:
    """Rows off a vector can be: what is outside of a row is hidden element by element."""
    print("seed", SEED)
    n = int(np.random.default_rng(SEED).integers(270, 380)) * 64 + 8
    limit_static(STATIC_LIMIT)
    for columns in (n, n + 1):
        call = bound(name, 3000, columns, "bfloat16")
        variant = choose(call, {}, parse("sm_90a:114")).variant
        lines = replace(NormConfig.of(variant.config), lines=True, align_vectors=8, sort_period=0)
        assert built(call, lines) and built(call, replace(lines, lines=False, sort_period=64))
        if columns == n:
            with pytest.raises(ValueError, match=rf"{name}: rows of {n} .*takes sort_period=0, got 64"):
                built(call, replace(lines, sort_period=64))
        else:
            assert built(call, replace(lines, sort_period=64))


def built(call: Binding, config: NormConfig) -> Any:
    """The kernel of a call with a config."""
    variant = plan(call, {}, parse("sm_90a:114"), config=config.flat()).variant
    module, _, name = variant.kernel.partition(":")
    return getattr(importlib.import_module(module), name)(variant)


def test_gradients_of_rows_on_a_vector_by_clusters_of_another_gpu() -> None:
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    n = int(rng.integers(330, 380)) * 64 + 8 * int(rng.choice([3, 5, 7]))
    limit_static(STATIC_LIMIT)
    config = chosen("rmsnorm_bwd", 3000, n, "bfloat16", 114)
    assert config["lines"]
    call = kernel_calls.made(BY_NAME["rmsnorm_bwd"], 75, n, "bfloat16", "compact", rng)
    kernel_calls.check(call._replace(tile=config))


@pytest.mark.parametrize(("n", "resident"), [(16_384, 2), (24_576, 2), (28_672, 1)])
def test_wide_weights_of_quantised_rows_have_registers(n: int, resident: int) -> None:
    """Four CTAs spilled: 4118 x 16384 took 99 us instead of 53."""
    assert chosen("rmsnorm_fp8", 1000, n).get("resident", 1) == resident


@pytest.mark.parametrize(("n", "share"), [(300, 8), (1072, 16), (2304, 32), (6144, 64), (28_672, 160)])
def test_threads_that_find_the_largest_logit_have_many_vectors(n: int, share: int) -> None:
    """A row of 2304 takes 931 instructions of one warp instead of 649 of two, and instructions are the limit."""
    assert chosen("cross_entropy_metrics", 4096, n)["threads_per_row"] == share


@pytest.mark.parametrize(
    ("n", "wide", "threads"), [(4097, "bfloat16", 96), (4097, "float32", 160), (6854, "bfloat16", 224)]
)
def test_registers_hold_the_weights_of_an_unaligned_layer_norm(n: int, wide: str, threads: int) -> None:
    """With six vectors a thread, those of 8567 x 6854 spilled: 0.51 of a copy's rate in place of 0.88."""
    assert chosen("layernorm", 9000, n, wide)["threads"] == threads


@pytest.mark.parametrize(("n", "found"), [(137, (128, 8, 3)), (201, (128, 16, 4)), (257, (128, 16, 3))])
def test_gradients_of_short_unaligned_rows_have_few_threads(n: int, found: tuple[int, ...]) -> None:
    """With a vector each, threads mostly masked it: 573363 x 137 took 260 us instead of 153."""
    op = BY_NAME["layernorm"].grad
    assert isinstance(op, Op)
    arrays = {key: Array(t.of({"m": (300_000,), "n": n}), op.dtype_near(t, "bfloat16")) for key, t in op.inputs.items()}
    config = choose(bind(op, arrays), {}, parse("sm_90a:132")).variant.config
    assert tuple(config[key] for key in ("threads", "threads_per_row", "resident")) == found


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("aligned", [True, False])
def test_long_rows_with_wide_weights(name: str, aligned: bool) -> None:
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *name.encode(), aligned))
    n = int(rng.integers(*LONG[name])) // 8 * 8 + (0 if aligned else int(rng.integers(1, 8)))
    for _ in range(100):  # until all inputs are there, in float32 but the rows
        call = kernel_calls.made(BY_NAME[name], int(rng.integers(1, 12)), n, "bfloat16", "compact", rng)
        given = [call.arrays[key] for key in ("weight", "bias") if key in call.arrays and name != "silu_mul_fp8"]
        if all(a is not None and a.dtype == np.float32 for a in given):
            break
    kernel_calls.check(call)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gated_rows_are_computed_once(dtype: str) -> None:
    """In shared memory, where the products take the place of what they are of, and are read again to be quantised."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *dtype.encode()))
    n = int(rng.integers(65_600, 110_000)) | 1
    call = kernel_calls.made(BY_NAME["silu_mul_fp8"], 3, n, dtype, "compact", rng)._replace(attrs={"block": 0})
    assert call.planned()[1].variant.config["form"] == "smem"
    kernel_calls.check(call)
