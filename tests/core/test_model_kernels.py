"""Kernels of the ops of models without a GPU: drawn sizes, layouts, dtypes and attributes, run on NumPy arrays."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.ops import MODELS
from cute_ops.ops.routing.topk import topk_step
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS

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
