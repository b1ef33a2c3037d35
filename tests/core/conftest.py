"""A small op of the tests' own, with its kernels beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cute_ops import FLOATS, Array, Op, Tensor
from cute_ops.declaration.binding import bind
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from tests.programs import asking


def copying_variant(kernel: str = "Copy", n: int = 64, memory: Mapping[str, Memory] | None = None) -> Variant:
    op = Op(
        "copying",
        inputs={"x": Tensor("*m n", "T")},
        outputs={"out": Tensor("*m n", "T")},
        dtypes={"T": FLOATS},
        reference=lambda xp, x: x,
        kernel=f"tests.ops.copying:{kernel}",
    )
    return plan(bind(op, {"x": Array((4, n), "bfloat16")}), memory or {}, parse("sm_90a")).variant


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Waits until a compile begins; the process that compiles."""
    monkeypatch.setenv("CUTE_OPS_TEST_BEGUN", str(tmp_path / "begun"))
    return asking.begun


@pytest.fixture
def variant() -> Callable[..., Variant]:
    """Makes variants of the copying op: ``variant("Broken", n=128)``."""
    return copying_variant
