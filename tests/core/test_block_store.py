"""Short rows that start anywhere in a vector are stored through shared memory, in whole vectors."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from cute_ops import Array, Op
from cute_ops.autotune.dispatch import choose
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.target import parse
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.ops import MODELS, OPS, PARTS
from cute_ops.testing import kernel_calls
from cute_ops.tools import sass
from tests.ops.reducing import OPS as REDUCING

SEED = int(os.environ.get("CUTE_OPS_SEED", "41"))
NAMES = (
    "softmax", "layernorm", "add_rmsnorm", "sum_bwd", "scaled_fp8", "rmsnorm_fp8", "silu_mul_fp8", "probabilities",
    "unit_bwd", "add_rmsnorm_fp8",
)  # fmt: skip
BY_NAME = {op.name: op for each in (*OPS, *PARTS, *MODELS, *REDUCING) for op in (each, each.grad) if isinstance(op, Op)}


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_some_ctas(name: str) -> None:
    """Races are watched for; the last CTA has fewer rows, which end inside a vector."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *name.encode()))
    for n in (int(rng.integers(1, 64)), int(rng.integers(65, 256)), 97):
        for rows, dtype in ((37, "bfloat16"), (133, "float32")):
            kernel_calls.check(kernel_calls.made(BY_NAME[name], rows, n, dtype, "compact", rng), n < 100)


@pytest.mark.parametrize("name", ["layernorm", "add_rmsnorm"])
def test_rows_that_begin_off_a_vector_have_threads_enough(name: str) -> None:
    """No thread holds more than three vectors: of 505 columns eight threads would hold nine each, and spill them."""
    rng = np.random.default_rng((SEED, *name.encode()))
    for n in (97, int(rng.integers(100, 505)) | 1, 505):
        call = kernel_calls.made(BY_NAME[name], 21, n, "bfloat16", "off", rng)
        assert call.planned()[1].variant.config["form"] == "blocks"
        with kernel_calls.interpreted("cute_ops.kernels.norm.fwd_blocks"):
            kernel = import_module("cute_ops.kernels.norm.fwd_blocks")
            variant = call.planned()[1].variant
            held = kernel.blocks(variant, NormConfig.of(variant.config), name == "layernorm")
        assert held.tile.threads_per_row * kernel.VECTORS * 8 >= n, n
        kernel_calls.check(call, n < 100)


@pytest.mark.parametrize("name", ["layernorm", "add_rmsnorm"])
def test_rows_that_lie_apart_stay_in_registers(name: str) -> None:
    """They do not follow on each other: threads for single elements would hold too many vectors of them."""
    forms, op = {}, BY_NAME[name]
    arrays = {key: Array(t.of(op.example((64,), 333)), "bfloat16") for key, t in op.inputs.items()}
    for stride in (333, 334, 336):
        memory = {"x": Memory((stride, 1))}
        forms[stride] = choose(bind(op, arrays), memory, parse("sm_90a")).variant.config["form"]
    assert forms.pop(333) == "blocks" not in forms.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layernorm", "add_rmsnorm", "sum_bwd"])
def test_no_store_but_the_last_is_of_part_of_a_vector(name: str, tmp_path: Path) -> None:
    op = BY_NAME[name]
    sizes, path = op.example((4096,), 105), tmp_path / "kernel.cubin"
    arrays = {key: Array(t.of(sizes), op.dtype_near(t, "bfloat16")) for key, t in op.inputs.items()}
    worker.compile(choose(bind(op, arrays), {}, parse("sm_90a")).variant, path)
    stores = {a.bytes: a.number for a in sass.accesses(sass.sass(path)) if a.kind == "STG"}
    assert stores[16] >= stores[2] == len(op.outputs)
    assert len(stores) == 2
