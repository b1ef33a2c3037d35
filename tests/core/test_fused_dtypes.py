"""Ops of functions whose tiles and outputs have several dtypes: declarations, and kernels against references."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op, fused
from cute_ops.autotune.dispatch import choose
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse
from cute_ops.ops.expression.by_call import ByCall, kinds
from cute_ops.testing import kernel_calls
from cute_ops.tools import gradient, sass
from tests.ops import mixing
from tests.ops.mixing import Mixed
from tests.ops.row_forms import FORMS, in_form

TILE, ROW = "*m n", {"axis": -1, "keepdims": True}
PAIR = {"x": TILE, "y": TILE}
DRAWN = [*mixing.drawn(0, 27)]
each = pytest.mark.parametrize("mixed", DRAWN, ids=lambda mixed: f"{mixed.op.name[:-13]}_{mixed.letters}")


def outputs_of(op: Op) -> str:
    return " ".join(tensor.dtype for tensor in op.outputs.values())


def stages(op: Op) -> tuple[Op, ...]:
    return (op, *op.steps)


@pytest.mark.parametrize(
    ("function", "operands", "dtypes"),
    [
        # What follows from reductions alone is float32.
        (lambda xp, x: xp.sum(x, **ROW), {"x": TILE}, "float32"),
        (lambda xp, x: xp.astype(xp.sum(x, **ROW), x.dtype), {"x": TILE}, "T"),
        (lambda xp, x: xp.astype(xp.sum(x, **ROW), "bfloat16"), {"x": TILE}, "bfloat16"),
        # An output has the dtype that it says; within a function astype rounds, to float32 it does nothing.
        (lambda xp, x: (xp.astype(x * 2, "float32"), x * 3), {"x": TILE}, "float32 T"),
        (lambda xp, x: (xp.astype(x, "float16"), xp.astype(x, "bfloat16") * 2), {"x": TILE}, "float16 T"),
        (lambda xp, x: xp.astype(x, "float32") * 2, {"x": TILE}, "T"),
        (lambda xp, x: xp.astype(x * 2, "float8_e4m3fn"), {"x": TILE}, "T"),
        (lambda xp, x, y: xp.astype(x * y, y.dtype), {"x": TILE, "y": "n"}, "T_y"),
        (lambda xp, x: xp.astype(x > 0, "float32"), {"x": TILE}, "float32"),
        # Else that of the tiles from which it is computed, whatever vectors have.
        (lambda xp, x, y: x + y, {"x": TILE, "y": "n"}, "T"),
        (lambda xp, x, y: (x + y, x * 2, y * 2), {"x": TILE, "y": "float32 *m n"}, "float32 T float32"),
        (lambda xp, x, y: (x + y, y * 2), {"x": TILE, "y": "any *m n"}, "T T"),
        (lambda xp, x, y: x + y, {"x": "bfloat16 *m n", "y": "float16 *m n"}, "float32"),
        (lambda xp, x, y: x + y, {"x": "bfloat16 *m n", "y": "bfloat16 *m n"}, "bfloat16"),
        (lambda xp, x, y: xp.astype(x + y, x.dtype), {"x": "bfloat16 *m n", "y": "float32 *m n"}, "bfloat16"),
        (lambda xp, x, y: xp.astype(x + y, x.dtype), {"x": TILE, "y": "bfloat16 *m n"}, "T"),
    ],
)  # fmt: skip
def test_the_dtype_of_an_output(function: Any, operands: dict[str, str], dtypes: str) -> None:
    op = fused(function, operands=operands, name="made")
    assert outputs_of(op) == dtypes
    gradient.check(op, Case("", {"m": (3,), "n": 5}))


def test_a_dtype_that_does_not_follow_is_asked_for() -> None:
    message = "out is computed from tiles of T, bfloat16: say its dtype, xp.astype(out, 'float32')"
    with pytest.raises(ValueError, match=re.escape(message)):
        fused(lambda xp, x, y: x + y, operands={"x": TILE, "y": "bfloat16 *m n"}, name="made")


def test_attributes_may_not_change_a_dtype() -> None:
    def made(xp: Any, x: Any, *, dtype: str) -> Any:
        return xp.astype(x, dtype)

    op = fused(made, operands={"x": TILE}, attrs={"dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"its outputs are float16 with \{'dtype': 'float16'\}, else bfloat16"):
        op.reference(np, np.zeros((2, 3), "float32"), dtype="float16")


def test_functions_that_say_nothing_have_the_names_that_they_had() -> None:
    def gelu_add(xp: Any, x: Any, bias: Any, residual: Any) -> Any:
        return xp.gelu(xp.astype(x, "float32") + bias) + residual

    def in_the_dtype_of_x(xp: Any, x: Any) -> Any:
        return xp.astype(xp.exp(x), x.dtype)

    assert ByCall(gelu_add).op("trt").name == "gelu_add_trt_822fb969b14c"
    assert ByCall(in_the_dtype_of_x).op("t").name == "in_the_dtype_of_x_t_1ef30bf0ea18"


def test_the_op_of_a_call_with_tiles_of_several_dtypes() -> None:
    import ml_dtypes

    def found(*dtypes: Any) -> tuple[str, str]:
        given = [np.zeros((2, 3, 8), dtype) for dtype in dtypes]
        op, fits = ByCall(mixing.momentum).choose(given, (), np.ndarray)
        assert op.name.startswith(f"momentum_{kinds(fits)}_")
        return kinds(fits), outputs_of(op)

    half, bfloat16 = "float16", ml_dtypes.bfloat16
    assert found(half, half, half) == ("ttt", "T T")
    assert found(bfloat16, "float32", half) == ("tBtFtH", "float32 float16")
    assert found(bfloat16, "float32", "float32") == ("tBtFtF", "float32 float32")
    op = ByCall(mixing.added)
    assert op.find("tBtF") is op.choose([np.zeros((2, 8), bfloat16), np.zeros((2, 8), "float32")], (), np.ndarray)[0]
    assert ByCall(mixing.added).find("tt").name != op.find("tBtF").name


@pytest.mark.parametrize(("shape", "kind", "declared"), [((1, 3, 8), "e", "*m n"), ((2, 1, 8), "b", "*b n")])
def test_expanded_tiles_have_any_dtype(shape: tuple[int, ...], kind: str, declared: str) -> None:
    """What the rows of an example share does, too."""
    rows = np.zeros(shape, "float32")
    op, fits = ByCall(mixing.modulated).choose([np.zeros((2, 3, 8))] * 2 + [rows], (), np.ndarray)
    assert kinds(fits) == f"tt{kind}" and outputs_of(op) == "bfloat16 T"
    assert op.inputs["scale"].declared == f"T_scale[{declared}]"


@pytest.mark.drawn(0.4)
@pytest.mark.no_cover
@each
def test_kernels_compute_the_reference(mixed: Mixed) -> None:
    for i, layout in enumerate(kernel_calls.LAYOUTS):
        for op in stages(mixed.op):
            n, rows = [(1, 3), (7, 5), (64, 3), (97, 4), (1032, 2), (1033, 3)][(i + len(mixed.op.name)) % 6]
            kernel_calls.check(kernel_calls.made(op, rows, n, mixed.dtype, layout, np.random.default_rng([n, rows])))


@pytest.mark.no_cover
@each
def test_kernels_for_any_length(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "plan", partial(kernel_calls.plan, fixed=False))
    for op in stages(mixed.op):
        kernel_calls.check(kernel_calls.made(op, 3, 97, mixed.dtype, "apart", np.random.default_rng(0)))


@pytest.mark.no_cover
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("letters", ["BF", "FH", "HB"])
def test_every_form_computes_the_reference(letters: str, form: str) -> None:
    for function in (mixing.norm_beside_sum, mixing.divergence):
        for op in stages(mixing.of(function, letters).op):
            made = kernel_calls.made(op, 13, 97, "float32", "compact", np.random.default_rng(0))
            planned = made.planned()[1]
            sums = {"r", "s"} & {*planned.variant.config["kinds"]}
            if not sums or "clusters" in FORMS[form]:
                kernel_calls.check(made._replace(tile=in_form(planned, form)))


@pytest.mark.drawn(0.35)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("mixed", DRAWN[:: len(DRAWN) // 6], ids=lambda mixed: f"{mixed.op.name[:-13]}_{mixed.letters}")
def test_kernels_compile_without_spills_to_wide_accesses(mixed: Mixed, arch: str, tmp_path: Path) -> None:
    for op in stages(mixed.op):
        sizes, path = op.example((64,), 4096), tmp_path / f"{op.name}.cubin"
        arrays = {name: Array(t.of(sizes), op.dtype_near(t, mixed.dtype)) for name, t in op.inputs.items()}
        worker.compile(choose(bind(op, arrays), {}, parse(arch)).variant, path)
        assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path)), op
        loads = [a.bytes for a in sass.accesses(sass.sass(path)) if a.kind in ("LDG", "LDGSTS", "STG")]
        assert max(loads) == 16, (op, loads)


@pytest.mark.no_cover
@pytest.mark.parametrize(("n", "scale"), [(4096, 1.0), (32768, 1.0), (8192, 8.0), (50257, 0.1)])
def test_short_exponentials_below_a_maximum_suffice_for_float32(n: int, scale: float) -> None:
    """By the tolerance of float32 results, at rows of 16 bits that lie near their maximum or far below."""

    def total(xp: Any, x: Any) -> Any:
        return xp.sum(xp.exp(x - xp.max(x, **ROW)), **ROW)

    made = kernel_calls.made(fused(total, operands={"x": TILE}), 2, n, "bfloat16", "compact", np.random.default_rng(n))
    assert made.planned()[0].outputs["out"] == Array((2, 1), "float32")

    def scaled(arrays: Any) -> Any:
        return {name: (a.astype(np.float32) * scale).astype(a.dtype) for name, a in arrays.items()}

    more = made.more
    kernel_calls.check(made._replace(arrays=scaled(made.arrays), more=lambda seed: scaled(more(seed))))
