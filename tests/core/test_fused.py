"""Ops of functions: declarations, kernels against references, gradients."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Array, Op, fused, testing
from cute_ops import ops as ours
from cute_ops.autotune.dispatch import choose
from cute_ops.calls import lookup, manifest
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.expressions import TraceError
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.ops.expression.by_call import ByCall, kinds
from cute_ops.ops.reduction.divergence import distillation_step, divergence_step
from cute_ops.testing import kernel_calls
from cute_ops.tools import gradient, sass
from tests.emulator import machine_code
from tests.ops.fusing import COLUMN, OPS, PACKED, ROW, TILE

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


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("op", [divergence_step, distillation_step], ids=lambda op: op.name)
def test_a_divergence_with_its_gradient(op: Op, beta: float) -> None:
    for n, dtype, layout in ((40, "bfloat16", "compact"), (1001, "float16", "off"), (4099, "float32", "spaced")):
        case = Case("", {"m": (3,), "n": n}, attrs={"beta": beta, "temperature": 2.0 - beta})
        arrays = testing.inputs(op, case, dtype)
        for name in {"soft", "hard"} & arrays.keys():
            arrays[name][0] = 0.0
        arrays["student"][0, 0] = np.inf  # of a row that does not count
        where = {name: kernel_calls.place(op.inputs[name], a, layout) for name, a in arrays.items()}
        kernel_calls.check(kernel_calls.Call(op, arrays, where, case.attrs, "", lambda seed, a=arrays: a))


def test_a_gradient_keeps_what_it_reads() -> None:
    def total(xp: Any, x: Any) -> Any:
        return xp.sum(x, axis=-1, keepdims=True)

    def kept(op: Op) -> str:
        """Those of which only the shape and the dtype are used in brackets."""
        return " ".join(f"({key})" if tensor.unread else key for key, tensor in op.inputs.items())

    assert kept(BY_NAME["biased_gelu_bwd"]) == "x bias dout"  # no residual
    assert kept(BY_NAME["by_length_bwd"]) == "(bias) dout"
    assert kept(BY_NAME["averaged_bwd"]) == "dout"
    assert kept(BY_NAME["clipped_bwd"]) == "x dout"
    assert kept(BY_NAME["chosen_bwd"]) == "x y dout"  # with other attributes it may read others
    assert kept(fused(total, operands={"x": TILE}).grad) == "(x) dout"


def rms_norm(xp: Any, x: Any) -> Any:
    return x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda xp, x, y, b: (rms_norm(xp, x + y), x + y), "(b) out1 dout0 dout1"),
        (lambda xp, x, y, b: (x - y + b, xp.gelu(x - y + b)), "(b) out0 dout0 dout1"),
        # Two sums, of which each takes the place of what the other one needs, or one serves for both.
        (lambda xp, x, y, b: (xp.exp(x + y) * b, x + y, x + y + b), "b out1 dout0 dout1 dout2"),
        # No fewer tiles are read with the output, nothing is read, or only the output's gradient is.
        (lambda xp, x, y, b: (rms_norm(xp, x + b), x + b), "x b dout0 dout1"),
        (lambda xp, x, y, b: (x + y, x + b), "(b) dout0 dout1"),
        (lambda xp, x, y, b: (xp.tanh(x + y) * b, x * y, x + y), "x y b dout0 dout1 dout2"),
        # What was rounded might be on the other side of a bound.
        (lambda xp, x, y, b: (xp.clip(x + y, -1.0, 1.0), x + y), "x y (b) dout0 dout1"),
        (lambda xp, x, y, b: (xp.maximum(x + y, b), x + y), "x y b dout0 dout1"),
        (lambda xp, x, y, b: (x + y - xp.max(x + y, axis=-1, keepdims=True), x + y), "x y (b) dout0 dout1"),
        # The derivative at an element where the result is 1 after rounding is not 0.
        (lambda xp, x, y, b: xp.tanh(x + y), "x y (b) dout"),
    ],
)  # fmt: skip
def test_a_gradient_reads_an_output_in_place_of_several_tiles(function: Any, reads: str) -> None:
    op = fused(function, name="made", operands={"x": TILE, "y": TILE, "b": ROW})
    assert op.grad is not None
    assert " ".join(f"({key})" if tensor.unread else key for key, tensor in op.grad.inputs.items()) == reads
    gradient.check(op, Case("", {"m": (3,), "n": 5}))


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


@pytest.mark.drawn(0.3)
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


@pytest.mark.slow
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


def compiled(op: Op, arch: str, path: Path) -> Variant:
    sizes = op.example((64,), 4096)
    arrays = {name: Array(t.of(sizes), "bfloat16" if t.dtype == "T" else "float32") for name, t in op.inputs.items()}
    variant = choose(bind(op, arrays), {}, parse(arch)).variant
    worker.compile(variant, path)
    return variant


def check_code(variant: Variant, path: Path, listing: str) -> None:
    """Aligned tiles beside float32 vectors move 16 bytes at a time."""
    assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path)), variant.op
    if "form" in variant.config:  # rows, because of sums over rows or columns
        assert re.search(r"LDG(STS)?\.E\.(\w+\.)*128", listing) and "STG.E.128" in listing, variant.op
        return
    assert set(re.findall(r"STG\.E\.EF(\S*)", listing)) == {".128"}, variant.op
    assert ("LDG.E.128" in listing) == (variant.op != "whole_bwd"), variant.op  # which reads nothing


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(BY_NAME), 8))
def test_kernels_compile(first: int, tmp_path: Path) -> None:
    ops = [*BY_NAME.values()][first : first + 8]
    paths = [tmp_path / f"{op.name}.cubin" for op in ops]
    variants = [compiled(op, "sm_90a", path) for op, path in zip(ops, paths, strict=True)]
    listings = machine_code.disassembled([path.read_bytes() for path in paths])
    for variant, path, listing in zip(variants, paths, listings, strict=True):
        check_code(variant, path, listing)


@pytest.mark.parametrize("name", ["biased_gelu", "scaled_gate_bwd"])
def test_kernels_compile_for_older_gpus(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    check_code(compiled(BY_NAME[name], "sm_80", path), path, sass.sass(path))


REFUSED = {
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
    # What the function changes may be what it reads, so the defaults are compared with what was declared.
    assert calls == [2.0, 3.0]


# --- operands' shapes by the call ------------------------------------------------------------------------------------


def biased(xp: Any, x: Any, bias: Any, residual: Any) -> Any:
    return xp.tanh(x + bias) * residual


def gated(xp: Any, x: Any, bias: Any = None, scale: Any = 2.0, *, limit: float = 1.0) -> Any:
    n = x.shape[-1] // 2
    gate, up = x[..., :n], x[..., n:]
    if bias is not None:
        gate, up = gate + bias[..., :n], up + bias[..., n:]
    return xp.clip(xp.silu(gate) * up, -limit, limit) * scale


CALLS = {
    "trt": ((3, 4, 8), (8,), (3, 4, 8)), "tcs": ((3, 8), (3, 1), ()), "trs": ((3, 8), (1, 8), (1, 1)),
    "tnn": ((3, 8), None, None), "crt": ((3, 1), (8,), (3, 8)),
    # All of one row, of one column, of one row of several, of one number, of none.
    "ttc": ((8,), (8,), (1,)), "ttr": ((3, 1), (3, 1), (1,)), "trc": ((1, 8), (8,), (1, 1)), "ttt": ((1,), (1,), (1,)),
    "tr0": ((0, 8), (8,), (8,)),
    # A square; some of the leading dims.
    "tcr": ((8, 8), (8, 1), (8,)), "ted1": ((2, 3, 8), (3, 8), (2, 1, 1)), "bet1": ((2, 1, 8), (1, 3, 8), (2, 3, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_operands_broadcast_as_in_numpy(case: str) -> None:
    rng, wanted = np.random.default_rng(0), case.rstrip("01") + "r" * case.endswith("0")
    given = [0.5 if shape is None else rng.standard_normal(shape) for shape in CALLS[case]]
    op, fits = ByCall(biased).choose(given, (), np.ndarray)
    assert kinds(fits) == wanted and op.name.startswith(f"biased_{wanted}_")
    arrays = [
        np.broadcast_to(np.reshape(a, how.own), how.sizes)
        for a, how in zip(given, fits, strict=True)
        if how is not None
    ]
    exact = np.tanh(given[0] + given[1]) * given[2]
    (out,) = op.reference(np, *arrays)
    assert out.shape == exact.shape
    np.testing.assert_allclose(out, exact, rtol=1e-12)
    bound = bind(op, {n: Array(a.shape, "float32") for n, a in zip(op.inputs, arrays, strict=True)})
    assert [array and array.shape for array in bound.outputs.values()] == [exact.shape]


def test_halves_and_what_is_left_out_follow_from_the_function() -> None:
    by_call, x = ByCall(gated), np.ones((3, 8))
    found = {
        kinds(fits): op
        for given in ([x], [x, np.ones(8)], [x, np.ones(8), np.ones((3, 1))])
        for op, fits in [by_call.choose(*by_call.bind(given, {}), np.ndarray)]
    }
    assert [*found] == ["2t_n", "2t2rn", "2t2rc"]
    assert repr(found["2t2rc"]).endswith("(x: T[*m 2n], bias: T_bias[2n], scale: T_scale[*m 1]) -> out: T[*m n]")
    assert found["2t_n"].no_gradient == ("scale",)
    other, _ = by_call.choose(*by_call.bind([x], {"limit": 2.0}), np.ndarray)
    assert other is not found["2t_n"]


def test_names_are_the_same_in_every_process_and_other_functions_have_others() -> None:
    def again(other: bool) -> ByCall:
        def biased(xp: Any, x: Any, bias: Any, residual: Any) -> Any:
            return residual * xp.tanh(x + bias) + (1 if other else 0)

        return ByCall(biased)

    op = ByCall(biased).op("trt")
    assert op.name == "biased_trt_0d74c05339b0"
    assert again(False).op("trt") is op
    assert again(True).op("trt").name not in (op.name, again(True).op("ttt").name)
    assert ByCall(lambda xp, x: x * 2).op("t").name.startswith("lambda_t_")


CALLED = {
    "cute.biased: argument `bias` has shape [7], which does not broadcast with those before it.\n"
    "  x: [3, 8]\n  bias: [7]\n  residual: number": (biased, [(3, 8), (7,), 1.0], {}),
    "argument `residual` has shape [2, 1, 1, 7], which": (biased, [(3, 8), (8,), (2, 1, 1, 7)], {}),
    "no argument has the shape of the result, [3, 8]; one must, because its dtype is the result's: write "
    "broadcast_to(x, (3, 8)).": (biased, [(3, 1), (8,), 1.0], {}),
    "no argument has a last dim, so the result has no rows": (biased, [(), 1.0, 2], {}),
    "argument `x` has 7 columns, which two halves cannot share": (gated, [(3, 7)], {}),
    "argument `bias` has shape [2, 2], which does not broadcast": (gated, [(3, 8), (2, 2)], {}),
    "argument `bias` has 2 columns, expected 8, two halves.": (gated, [(3, 8), (2,)], {}),
    "argument `bias` must be an array, a number or None, got list": (biased, [(3, 8), [1], 1.0], {}),
    "argument `bias` is a bool, on which Python decides": (biased, [(3, 8), True, 1.0], {}),
    "argument `residual` is required": (biased, [(3, 8), (8,)], {}),
    "4 operands were given; it takes `x`, `bias`, `residual`.": (biased, [(3, 8)] * 4, {}),
    "2 operands were given; it takes `y`. Its first parameter, `x`, is the namespace: call it `xp`.": (
        lambda x, y: x + y, [(3, 8), (3, 8)], {}
    ),
    "argument `bias` was given twice": (biased, [(3, 8), (8,)], {"bias": 1.0}),
    "unknown argument `limt` (did you mean limit?)": (gated, [(3, 8)], {"limt": 1.0}),
    "attribute `limit` is a kernel's constant: give a number or text, not list": (gated, [(3, 8)], {"limit": [1]}),
    "attribute `cap` is required": (lambda xp, x, *, cap: xp.clip(x, -cap, cap), [(3, 8)], {}),
    "add of None": (biased, [(3, 8), None, 1.0], {}),
    "an index of a value": (lambda xp, x: (x * 2)[..., : x.shape[-1] // 2], [(3, 8)], {}),
    "a slice of a row": (lambda xp, x: x[..., : x.shape[-1] // 4], [(3, 8)], {}),
}  # fmt: skip


@pytest.mark.parametrize("text", CALLED)
def test_what_a_call_cannot_be_says_why(text: str) -> None:
    function, shapes, attrs = CALLED[text]
    by_call, given = ByCall(function), [np.ones(s) if isinstance(s, tuple) else s for s in shapes]
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        by_call.choose(*by_call.bind(given, attrs), np.ndarray)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda xp, *operands: operands[0], r"<lambda> does not name its operands: .* `\*`: \(xp, x, y, \*, limit"),
        (lambda xp: 1.0, "does not name its operands"),
        (lambda xp, x, dx: x + dx, "operand `dx` has the name of an output or a gradient"),
    ],
)
def test_functions_that_no_call_can_have(function: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        ByCall(function)


NAMED = {
    "argument `operands` has `ga` (did you mean gain?),": ({"x": "*m n", "ga": "n"}, {}),
    "argument `attrs` has `bound`, but f has no such attribute; its": ({"x": "*m n", "gain": "n"}, {"bound": 1.0}),
    "argument `operands` lacks `gain`, which f takes.": ({"x": "*m n"}, {"eps": 1.0}),
    "argument `attrs` lacks `eps`, which f takes.": ({"x": "*m n", "gain": "n"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("text", NAMED)
def test_declared_names_are_those_of_the_function(text: str) -> None:
    operands, attrs = NAMED[text]
    with pytest.raises(TypeError, match=re.escape(f"cute_ops.fused: {text}")):
        fused(lambda xp, x, gain, *, eps: x * gain + eps, operands=operands, attrs=attrs, name="f")


def test_commands_and_manifests_find_the_ops_of_calls(tmp_path: Path) -> None:
    file = tmp_path / "ops_by_call.py"
    file.write_text(
        "from cute_ops.ops.expression.by_call import decorate\n\n"
        "def gated(xp, x, bias, *, limit=1.0, kind='silu'):\n"
        "    n = x.shape[-1] // 2\n"
        "    return xp.clip(getattr(xp, kind)(x[..., :n]) * x[..., n:] + bias, -limit, limit)\n\n"
        "gated = decorate(gated, '', None, {}, None, lambda of: lambda: None)\n"
    )
    op, gradient = lookup.find_all(str(file))
    assert repr(op).endswith("(x: T[*m 2n], bias: T[*m n]) -> out: T[*m n]")
    assert lookup.find(f"{file}:gated") is op and lookup.find(f"{file}:gated.grad") is gradient
    other = lookup.find(f"{file}:gated.2tr(limit=2.5,kind='gelu')")
    assert lookup.find(str(lookup.place(other.grad))) is other.grad
    bound = bind(other, {"x": Array((3, 16), "bfloat16"), "bias": Array((8,), "float32")})
    line = str(manifest.call_of(bound, {}))
    assert line.endswith(":gated.2tr(limit=2.5,kind='gelu') x:bfloat16[3,16] bias:float32[8]")
    (call,) = manifest.parse(line.replace("ops_by_call:", f"{file}:"), files=True)
    assert call.op is other
    endless = sys.modules["ops_by_call"].gated.by_call.op("2tr", (("limit", 1e400), ("kind", "silu")))
    assert lookup.place(endless) is None  # no text says infinity
    refused = (
        ("tx", "kind for each of x, bias"),
        ("2tr(cap=1)", "no attribute 'cap'"),
        ("2tr(cap)", "are no attributes"),
    )
    for attribute, text in refused:
        with pytest.raises(ValueError, match=re.escape(text)):
            lookup.find(f"{file}:gated.{attribute}")


@pytest.mark.parametrize("strides", [(0, 1), (1, 0)], ids=str)
def test_tiles_that_some_leading_dims_share_are_not_copied(strides: tuple[int, int]) -> None:
    op = ByCall(biased).op("trt")
    for stage in (op, op.grad):
        for n, dtype in ((7, "float32"), (64, "bfloat16")):
            arrays = testing.inputs(stage, Case("", {"m": (2, 3), "n": n}), dtype)
            shared = arrays["residual"]
            shared[...] = shared[:1] if strides[0] == 0 else shared[:, :1]
            where = {name: kernel_calls.place(stage.inputs[name], a, "compact") for name, a in arrays.items()}
            where["residual"] = Memory((strides[0] * n, strides[1] * n, 1))
            kernel_calls.check(kernel_calls.Call(stage, arrays, where, {}, "", lambda seed, a=arrays: a))


def test_an_op_of_a_call_compiles(tmp_path: Path) -> None:
    stage, path = ByCall(biased).op("trn").grad, tmp_path / "kernel.cubin"
    dtypes = {"x": "bfloat16", "dout": "bfloat16"}
    arrays = {n: Array(t.of({"m": (64,), "n": 4096}), dtypes.get(n, "float32")) for n, t in stage.inputs.items()}
    worker.compile(choose(bind(stage, arrays), {}, parse("sm_90a")).variant, path)
    assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path))
