"""Kernels of the ops of models without a GPU: drawn sizes, layouts, dtypes and attributes, run on NumPy arrays."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.ops import MODELS
from cute_ops.ops.routing.topk import topk_step
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS
from cute_ops.tools import sass

ALL = [each for op in MODELS if not op.program for each in (op, *op.steps)] + [topk_step]
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}
ATTRS: dict[str, list[dict[str, Any]]] = {
    "cross_entropy": [{}, SMOOTHED, {"softcap": 3.0, **SMOOTHED}, {"logit_scale": 0.5, "label_smoothing": 0.2}],
    "topk": [{"k": 1}, {"k": 3}, {"k": 40}],
}


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_kernels_agree_with_the_reference(op: Op) -> None:
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    for i in range(10):
        family = "topk" if "topk" in op.name else "cross_entropy" if "cross_entropy" in op.name else ""
        choices = ATTRS.get(family, [{}])
        attrs = choices[i % len(choices)]
        least = attrs.get("k", 1)
        n = int(rng.integers(least, least + (33, 301, 2500)[i % 3]))
        call = kernel_calls.made(op, int(rng.choice([1, 2, 5, 37])), n, FLOATS[i % 3], LAYOUTS[i % 4], rng)
        call = call._replace(attrs={**call.attrs, **attrs})
        try:
            kernel_calls.check(call)
        except Exception as error:
            raise AssertionError(f"{call.said} {attrs}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op in ALL for case in op.cases], ids=lambda v: v.name
)  # fmt: skip
def test_every_case_compiles_without_spills(op: Op, case: Case, tmp_path: Path) -> None:
    """A stack is allowed to gradients of expressions of two tiles only; nothing is spilled to local memory."""
    arrays = testing.specs(op, case, "bfloat16")
    variant = plan(bind(op, arrays, testing.attributes(op, case)), {}, parse("sm_90a")).variant
    worker.compile(variant, tmp_path / "kernel.cubin")
    for each in sass.resources(tmp_path / "kernel.cubin"):
        assert each.local == 0
        assert each.stack <= (256 if op.kernel.endswith("select:fused") else 32)


def test_weights_of_a_row_in_segments_are_counted_once() -> None:
    """A thread's batch of vectors may end beyond its segment, where the next one's weights are."""
    (op,) = (op for op in ALL if op.name == "cross_entropy_metrics")
    for seed in range(8):  # until weights are drawn
        call = kernel_calls.made(op, 2, 140_003, "bfloat16", "compact", np.random.default_rng(seed))
        if call.arrays["weight"] is not None:
            break
    kernel_calls.check(call._replace(attrs={**call.attrs, "label_smoothing": 0.1}))
