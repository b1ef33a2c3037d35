"""Products and reductions of their rows that depend on each other: the framework's product, and a pass over rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op, fused_linear, testing
from cute_ops.autotune.dispatch import choose, fallback
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse
from cute_ops.testing import kernel_calls
from cute_ops.tools import sass
from tests.ops import late

each = pytest.mark.parametrize("op", late.OPS, ids=lambda op: op.name)


def passes(op: Op) -> list[Op]:
    """The pass of an op, and those of its gradient."""
    assert op.fallback is not None
    return [*op.fallback.program.ops, *(step for step in op.steps if not step.contracted)]


def called(op: Op, fused: str, dtype: str = "bfloat16") -> Any:
    sizes = {"m": (128,), "n": 4096, "k": 256}
    given = {name: Array(t.of(sizes), op.dtype_near(t, dtype)) for name, t in op.inputs.items()}
    return bind(op, given, {"fused": fused})


def test_outputs() -> None:
    outputs = {op.name: " ".join(t.declared for t in op.outputs.values()) for op in late.OPS}
    assert outputs == {
        "softmax": "T[*m n]", "layer_norm": "T[*m n] T[*m n]", "log_sum_exp": "float32[*m 1]", "total": "float32[*m 1]",
        "normed_heads": "T[*m n]",
    }  # fmt: skip


@each
def test_the_framework_multiplies(op: Op) -> None:
    for fused in ("auto", "never"):
        for dtype in ("bfloat16", "float32"):
            assert fallback(called(op, fused, dtype), {}, parse("sm_90a")) is op.fallback.program  # type: ignore[union-attr]
    why = "it returns reductions alone" if op.name == "total" else "values with columns depend on xp."
    message = "attribute `fused` is 'always', but no kernel computes a product and such reductions of its rows: "
    with pytest.raises(ValueError, match=re.escape(message + why)):
        called(op, "always")


@each
def test_references(op: Op) -> None:
    given = testing.inputs(op, Case("", {"m": (3, 2), "n": 48, "k": 8}), "bfloat16")
    testing.check(op, given, {"fused": "auto"}, testing.run_reference(op, given, {}))


@each
def test_passes_compute_the_reference(op: Op) -> None:
    for made in passes(op):
        for n, dtype, layout in ((48, "bfloat16", "compact"), (96, "float32", "spaced"), (1040, "float16", "compact")):
            kernel_calls.check(kernel_calls.made(made, 5, n, dtype, layout, np.random.default_rng(n)))


@pytest.mark.slow
@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@each
def test_passes_compile_without_spills(op: Op, arch: str, tmp_path: Path) -> None:
    for made in passes(op):
        sizes, path = made.example((4096,), 4096), tmp_path / f"{made.name}.cubin"
        arrays = {name: Array(t.of(sizes), made.dtype_near(t, "bfloat16")) for name, t in made.inputs.items()}
        worker.compile(choose(bind(made, arrays), {}, parse(arch)).variant, path)
        assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path)), made


def test_attributes_may_not_add_such_reductions() -> None:
    def scaled(xp: Any, acc: Any, *, centred: bool) -> Any:
        return acc - xp.mean(acc, **late.ROW) if centred else acc * 2

    op = fused_linear(scaled, attrs={"centred": False})
    arrays = [np.ones((2, 8), np.float32), np.ones((4, 8), np.float32)]
    with pytest.raises(ValueError, match=r"scaled cannot be fused: values with columns depend on xp\.mean of a row"):
        op.reference(np, *arrays, centred=True)
    other = fused_linear(scaled, attrs={"centred": True}, name="sometimes_centred")
    assert (other.reference(np, *arrays, centred=False)[0] == 16).all()


def test_outputs_of_products_say_their_dtype() -> None:
    def both(xp: Any, acc: Any, residual: Any) -> Any:
        y = acc + residual
        return xp.astype(y, "float32"), xp.astype(y, residual.dtype), xp.astype(acc, acc.dtype), y

    op = fused_linear(both, operands={"residual": "*m n"})
    assert [t.dtype for t in op.outputs.values()] == ["float32", "T_residual", "float32", "T"]
    given = testing.inputs(op, Case("", {"m": (3,), "n": 16, "k": 8}, {"T_residual": "float16"}), "bfloat16")
    outputs = testing.run_reference(op, given, {})
    assert [str(out.dtype) for out in outputs] == ["float32", "float16", "float32", "bfloat16"]
