"""Ops of functions: declarations, kernels against references, gradients."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Array, Op, fused
from cute_ops import ops as ours
from cute_ops.binding import bind
from cute_ops.dispatch import choose
from cute_ops.expressions import TraceError
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse
from cute_ops.op import Case
from cute_ops.tools import gradient, sass

sys.path.append(str(Path(__file__).parent / "kernels"))
sys.path.append(str(Path(__file__).parents[1] / "interpreter"))
import kernel_calls
from fusing import COLUMN, OPS, PACKED, ROW, TILE

ALL = [stage for op in OPS for stage in (op, op.grad) if stage]
BY_NAME = {op.name: op for op in ALL}
each = pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)


def test_the_declaration_follows_from_the_function() -> None:
    op = BY_NAME["affine"]
    assert repr(op) == (
        "Op affine(x: T[*m n], scale: T_scale[*m 1], shift: T_shift[]) -> line: T[*m n], curve: T[*m n]"
    )
    assert repr(op.grad) == (
        "Op affine_bwd(x: T[*m n], scale: T_scale[*m 1], shift: T_shift[], dline: T[*m n], dcurve: T[*m n])"
        " -> dx: T[*m n], dscale: T_scale[*m 1], dshift: T_shift[]"
    )
    assert op.doc == "A scaled tile, and its tanh."


def test_docstrings_may_be_given() -> None:
    def double(xp: Any, x: Any) -> Any:
        """The function's own."""
        return 2 * x

    own = fused(double, operands={"x": TILE})
    given = fused(double, operands={"x": TILE}, doc="The op's.", grad_doc="Its gradient's.")
    assert [own.doc, own.grad.doc] == ["The function's own.", "Gradient of :func:`double`."]
    assert [given.doc, given.grad.doc] == ["The op's.", "Its gradient's."]


@pytest.mark.parametrize(
    ("name", "n", "dtype", "threads"),
    [
        ("silu", 4096, "bfloat16", 256), ("silu", 4096, "float32", 512), ("silu_mul_bwd", 4096, "bfloat16", 128),
        ("silu_mul_bwd", 4097, "float32", 256), ("swiglu", 4096, "bfloat16", 256), ("swiglu", 4096, "float32", 256),
        ("swiglu", 4097, "bfloat16", 128), ("swiglu_bwd", 4096, "float32", 128), ("swiglu_again", 64, "bfloat16", 128),
    ],
)  # fmt: skip
def test_threads_follow_from_streams_and_alignment(name: str, n: int, dtype: str, threads: int) -> None:
    op = next(o for op in (*ours.OPS, *ours.PARTS) for o in (op, *op.steps) if o.name == name)
    dims = op.example((64,), n)
    arrays = {key: Array(t.of(dims), dtype) for key, t in op.inputs.items()}
    assert choose(bind(op, arrays), {}, parse("sm_90a")).variant.config["threads"] == threads


@pytest.mark.parametrize("layout", ["compact", "spaced"])
@pytest.mark.parametrize("name", ["biased_gelu", "gated", "scaled_gate", "affine", "scaled", "gated_bwd"])
def test_rows_that_are_whole_ctas(name: str, layout: str) -> None:
    for n, dtype in ((4096, "bfloat16"), (2048, "float32"), (4096 + 8, "bfloat16")):
        kernel_calls.check(kernel_calls.made(BY_NAME[name], 3, n, dtype, layout, np.random.default_rng(n)))


def test_a_gradient_keeps_what_it_reads() -> None:
    def unread(name: str) -> list[str]:
        return [key for key, tensor in BY_NAME[name].inputs.items() if tensor.unread]

    assert unread("biased_gelu_bwd") == ["residual"]
    assert unread("by_length_bwd") == ["x", "bias"]
    assert unread("averaged_bwd") == ["x", "y"]
    assert unread("clipped_bwd") == []  # with other attributes it may read others


def test_gradients_that_are_another_tensor_are_not_written() -> None:
    def passed_on(op: Op) -> tuple[list[str], dict[str, str], dict[str, str | None]]:
        assert op.grad is not None
        return [*op.grad.outputs], dict(op.handed_on), {n: t.same_as for n, t in op.grad.outputs.items() if t.same_as}

    def two(xp: Any, x: Any, y: Any, z: Any, bias: Any) -> Any:
        return xp.exp(x + y) + z, xp.sum(x + y, axis=-1, keepdims=True) + bias, z * 2

    def added(xp: Any, x: Any, y: Any) -> Any:
        return x + y

    assert passed_on(BY_NAME["biased_gelu"]) == (["dx", "dbias"], {"residual": "out"}, {})
    assert passed_on(BY_NAME["chosen"]) == (["dx", "dy"], {}, {})
    made = fused(two, operands={"x": TILE, "y": TILE, "z": TILE, "bias": COLUMN})
    assert passed_on(made) == (["dx", "dy", "dz", "dbias"], {}, {"dy": "dx"})
    # One is left: a gradient has an op.
    assert passed_on(fused(added, operands={"x": TILE, "y": TILE})) == (["dy"], {"x": "out"}, {})
    gradient.check(made, Case("", {"m": (3,), "n": 5}))


@pytest.mark.parametrize("layout", kernel_calls.LAYOUTS)
@each
def test_kernels_compute_the_reference(op: Op, layout: str) -> None:
    for i, (n, rows) in enumerate(((1, 1), (7, 5), (64, 3), (97, 4), (2048, 2))):
        for dtype in FLOATS if n in (7, 64) else (FLOATS[i % 3],):
            rng = np.random.default_rng([n, rows])
            kernel_calls.check(kernel_calls.made(op, rows, n, dtype, layout, rng))


@each
def test_kernels_for_any_length(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "plan", partial(kernel_calls.plan, fixed=False))
    for n, rows in ((7, 5), (64, 3)):
        for layout in ("compact", "apart"):
            kernel_calls.check(kernel_calls.made(op, rows, n, "bfloat16", layout, np.random.default_rng(n)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("off", ["x", "bias"])
def test_one_tensor_off_16_bytes(off: str, dtype: str) -> None:
    for op in (BY_NAME["biased_gelu"], BY_NAME["biased_gelu_bwd"], BY_NAME["gated"]):
        made = kernel_calls.made(op, 3, 64, dtype, "compact", np.random.default_rng(0))
        shifted = kernel_calls.place(op.inputs[off], made.arrays[off], "off")
        kernel_calls.check(made._replace(where={**made.where, off: shifted}))


def test_sums_over_many_rows() -> None:
    for name in ("biased_gelu_bwd", "affine_bwd"):
        made = kernel_calls.made(BY_NAME[name], 1201, 65, "float32", "apart", np.random.default_rng(0))
        kernel_calls.check(made)


def test_rows_beside_a_vector_are_realigned() -> None:
    """By the kernels of rows, which move 16 bytes at a time."""
    forms = {}
    for n in (7, 1032, 1033):
        for name in ("biased_gelu", "gated", "clipped"):
            made = kernel_calls.made(BY_NAME[name], 5, n, "bfloat16", "compact", np.random.default_rng(n))
            forms[name, n] = made.planned()[1].variant.config.get("form", "")
            kernel_calls.check(made)
    assert {key for key, form in forms.items() if form} == {("biased_gelu", 1033), ("gated", 1033)}


def test_workspaces_stop_growing_with_the_rows() -> None:
    def parts(m: int) -> dict[str, Array | None]:
        made = kernel_calls.made(BY_NAME["affine_bwd"], m, 8, "float32", "compact", np.random.default_rng(0))
        return dict(made.planned()[1].workspaces)

    assert parts(10**6) == parts(10**5)
    assert [array.shape for array in parts(3).values() if array] == [(128,)]  # of one CTA's rows


@pytest.mark.parametrize("op", [op for op in OPS if op.name != "rounded"], ids=lambda op: op.name)
@pytest.mark.parametrize("lead", [(3, 2), ()])
def test_gradients(op: Op, lead: tuple[int, ...]) -> None:
    attrs = {"kind": "silu"} if op.name == "chosen" else {"limit": 0.5} if op.name == "clipped" else {}
    for chosen in ({}, attrs):
        gradient.check(op, Case("", {"m": lead, "n": 5}, attrs=chosen))


OLDER = [pytest.param(BY_NAME[name], "sm_80", id=f"{name}-sm_80") for name in ("biased_gelu", "scaled_gate_bwd")]


@pytest.mark.parametrize(("op", "arch"), [*(pytest.param(op, "sm_90a", id=op.name) for op in BY_NAME.values()), *OLDER])
def test_kernels_compile(op: Op, arch: str, tmp_path: Path) -> None:
    """Aligned tiles beside float32 vectors move 16 bytes at a time."""
    sizes, path = op.example((64,), 4096), tmp_path / "kernel.cubin"
    arrays = {name: Array(t.of(sizes), "bfloat16" if t.dtype == "T" else "float32") for name, t in op.inputs.items()}
    variant = choose(bind(op, arrays), {}, parse(arch)).variant
    worker.compile(variant, path)
    kernels = sass.resources(path)
    assert all((kernel.stack, kernel.local) == (0, 0) for kernel in kernels)
    command = [sass.tool("cuobjdump"), "--dump-sass", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "form" in variant.config:  # rows, because of sums over rows or columns
        assert re.search(r"LDG(STS)?\.E\.(\w+\.)*128", listing) and "STG.E.128" in listing
        return
    streamed = re.findall(r"STG\.E\.EF(\S*)", listing)
    assert streamed
    assert set(streamed) == {".128"}
    assert ("LDG.E.128" in listing) == (op.name != "whole_bwd")  # which reads nothing


REFUSED = {
    "operand `mask` holds bools": (lambda xp, x, mask: xp.where(mask, x, 0.0), {"x": TILE, "mask": "bool *m n"}, {}),
    "out1 holds bools": (lambda xp, x: (x, x > 0), {"x": TILE}, {}),
    "out does not have the shape": (lambda xp, x, row: row * 2, {"x": TILE, "row": ROW}, {}),
    "it has no tile": (lambda xp, row, column: row * column, {"row": ROW, "column": COLUMN}, {}),
    "it returns 2 values for the outputs out": (lambda xp, x: (x, -x), {"x": TILE}, {"outputs": ("out",)}),
    "operand `x` has shape 'm n'": (lambda xp, x: x, {"x": "m n"}, {}),
    "x, which is packed": (lambda xp, x: x * 2, {"x": PACKED}, {}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_fused_is_refused(message: str) -> None:
    function, operands, more = REFUSED[message]
    with pytest.raises((ValueError, TraceError), match=re.escape(message)):
        fused(function, operands=operands, name="refused", **more)


def test_operands_without_a_gradient() -> None:
    def scaled_by(xp: Any, x: Any, row: Any, factor: Any) -> Any:
        return xp.tanh(x) * row * factor

    op = fused(scaled_by, operands={"x": TILE, "row": ROW, "factor": ""}, no_gradient=("row", "factor"))
    assert repr(op.grad).endswith("-> dx: T[*m n]")
    gradient.check(op, Case("", {"m": (3,), "n": 5}))
    made = kernel_calls.made(op.grad, 5, 64, "float32", "compact", np.random.default_rng(0))
    kernel_calls.check(made)
    assert not made.planned()[1].workspaces and "form" not in made.planned()[1].variant.config  # nothing is summed
    with pytest.raises(ValueError, match=r"no_gradient has \['colour'\]"):
        fused(scaled_by, operands={"x": TILE, "row": ROW, "factor": ""}, no_gradient=("colour",))


def test_attributes_may_not_change_what_is_returned() -> None:
    def pair(xp: Any, x: Any, *, both: bool) -> Any:
        return (x, -x) if both else x

    op = fused(pair, operands={"x": TILE}, attrs={"both": False})
    with pytest.raises(ValueError, match=r"^cute_ops\.fused: pair cannot be fused: it returns 2 values"):
        op.reference(np, np.zeros((2, 3), "float32"), both=True)


def test_a_function_is_traced_once_for_each_combination_of_attributes() -> None:
    calls = []

    def scaled(xp: Any, x: Any, *, factor: float) -> Any:
        calls.append(factor)
        return x * factor

    op = fused(scaled, operands={"x": "*m n"}, attrs={"factor": 2.0})
    calls.clear()
    x = np.ones((2, 3), np.float32)
    for factor in (2.0, 3.0, 2.0, 3.0):
        (out,) = op.reference(np, x, factor=factor)
        assert (out == factor).all()
    assert calls == [3.0]
