"""Kernels' arithmetic without a GPU: NumPy runs them, one number per thread (see ``tests/interpreter.py``).

Here a sample; ``python tests/kernel_calls.py`` goes through all lengths, rows, dtypes and layouts.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops.op import FLOATS, Op

sys.path.append(str(Path(__file__).parents[1]))
import kernel_calls
from kernel_calls import ALL, LAYOUTS

NORMS = [op for op in ALL if "norm" in op.name and "n" in op.static]
CALLS = 10  # of each op


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_kernels_agree_with_the_reference(op: Op) -> None:
    """Every number of a row counted once, every output stored once, nothing read or written beside the tensors."""
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    for i in range(CALLS):
        n, rows = int(rng.integers(1, (33, 301)[i % 2])), int(rng.choice([1, 2, 5, 37]))
        call = kernel_calls.made(op, rows, n, FLOATS[i % 3], LAYOUTS[i % 4], rng)
        try:
            kernel_calls.check(call)
        except Exception as error:
            raise AssertionError(f"{call.said}: {error}") from error


# A thread of these holds up to four vectors of one element each.
@pytest.mark.parametrize("n", [1, 3, 5, 9, 11, 13, 17, 19, 21, 23, 33, 35, 47])
@pytest.mark.parametrize("op", NORMS, ids=lambda op: op.name)
def test_norms_of_a_few_elements_to_a_thread(op: Op, n: int) -> None:
    for dtype in ("float32", "bfloat16"):
        kernel_calls.check(kernel_calls.made(op, 5, n, dtype, "compact", np.random.default_rng(n)))


def dropping(self: Any) -> Any:
    """``Total.value`` as it once was: of three sums it forgot one."""
    while len(self.sums) > 1:
        half = len(self.sums) // 2
        self.sums = [self.sums[i] + self.sums[i + half] for i in range(half)]
    return self.sums[0]


BROKEN = [
    pytest.param("_statistics", "Total", "value", dropping, 17, "output out: error", id="a sum is dropped"),
    pytest.param("_rows", "RowTile", "ends_outside", lambda *_: False, 200, "outside of all tensors", id="no mask"),
    pytest.param("_rows", "RowTile", "vector", lambda self, t, rank, k: t, 200, "stored", id="a vector twice"),
    pytest.param("_rows", "Vectors", "shift", lambda *_: 8, 256, "outside of all|output out", id="rows too early"),
]


@pytest.mark.fault(
    "a kernel that drops a sum, forgets a mask, takes a vector twice or starts a row too early",
    "tests on a CPU, where its threads are NumPy's, tell the output, the address or the bytes stored twice", "nothing",
)  # fmt: skip
@pytest.mark.parametrize(("module", "name", "method", "wrong", "n", "told"), BROKEN)
def test_a_broken_kernel_is_found(
    module: str, name: str, method: str, wrong: Callable[..., Any], n: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (op,) = (op for op in NORMS if op.name == "rmsnorm")
    call = kernel_calls.made(op, 5, n, "float32", "compact", np.random.default_rng(0))
    kernel_calls.check(call)
    with kernel_calls.interpreted():
        monkeypatch.setattr(getattr(importlib.import_module(f"cute_ops.kernels.{module}"), name), method, wrong)
    with pytest.raises((AssertionError, IndexError), match=told):
        kernel_calls.check(call)
