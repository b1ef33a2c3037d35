"""Plans: memory layouts to variants, views that merge leading dims, and what a variant's name depends on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from cute_ops import FLOATS, Array, Op, Tensor, WhileFew, testing
from cute_ops.autotune import dispatch
from cute_ops.autotune.dispatch import choose, fallback
from cute_ops.autotune.rows import resized
from cute_ops.calls import lookup
from cute_ops.declaration.binding import bind
from cute_ops.errors import CompileError
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory, compact, folded
from cute_ops.jit.plan import Plan, plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.ops import ATTENTION, PRODUCTS, rmsnorm
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import linear
from tests.ops import layouts, writing

SM90 = parse("sm_90a")


def plan_for(
    shape: tuple[int, ...], strides: tuple[int, ...] | None = None, address: int = 0, dtype: str = "bfloat16"
) -> Plan:
    bound = bind(rmsnorm, {"x": Array(shape, dtype)})
    return plan(bound, {"x": Memory(strides or compact(shape), address)}, SM90)


def x_of(found: Plan):
    key = found.variant.tensors["x"]
    assert key is not None
    return key


def test_compact_is_flat_whatever_the_rank() -> None:
    for shape in [(4, 64), (2, 3, 64), (2, 3, 4, 64)]:
        found = plan_for(shape)
        assert x_of(found).layout == "flat" and x_of(found).rank == len(shape) and not found.views


def test_no_leading_dims_are_one_row() -> None:
    """A kernel never gets a row-wise tensor of rank one, nor a number without a dim."""
    found = plan_for((64,))
    assert found.variant == plan_for((1, 64)).variant == plan_for((5, 64)).variant
    assert found.views == dict.fromkeys(("x", "out"), ((1, 64), (64, 1)))
    total = plan(bind(lookup.find("sum"), {"x": Array((64,), "float32")}), {}, SM90)
    assert total.views == {"x": ((1, 64), (64, 1)), "out": ((1,), (1,))}
    shared = plan(bind(TABLE, {"table": Array((4,), "float32"), "x": Array((3, 4), "float32")}), {}, SM90)
    assert shared.views == {"table": ((1, 4), (4, 1))}


def test_row_stride_is_free() -> None:
    found = plan_for((4, 64), (128, 1))
    assert x_of(found).layout == "strided" and x_of(found).row_align == 16 and not found.views


def test_same_variant_for_every_row_count() -> None:
    assert plan_for((4096, 64)).variant == plan_for((8192, 64)).variant


def test_leading_dims_merge_where_memory_allows() -> None:
    # A slice of the heads of a fused projection: (batch, seqlen) merge, heads do not.
    found = plan_for((2, 8, 4, 64), (8 * 768, 768, 64, 1))
    assert found.views["x"] == ((16, 4, 64), (768, 64, 1))
    assert found.views["out"] == ((16, 4, 64), (256, 64, 1))
    assert x_of(found).layout == "strided" and x_of(found).shape == (None, None, 64)


def test_fully_mergeable_becomes_two_dims() -> None:
    found = plan_for((2, 8, 64), (1024, 128, 1))
    assert found.views["x"] == ((16, 64), (128, 1)) and found.views["out"] == ((16, 64), (64, 1))


def test_size_one_dims_do_not_matter() -> None:
    assert x_of(plan_for((1, 8, 64), (7, 64, 1))).layout == "flat"
    assert plan_for((1, 8, 64), (7, 128, 1)).views["x"] == ((8, 64), (128, 1))


def test_expanded_rows_have_stride_zero() -> None:
    found = plan_for((4, 64), (0, 1))
    assert x_of(found).layout == "strided" and x_of(found).row_align == 16


@pytest.mark.parametrize(("address", "align"), [(0, 16), (256, 16), (8, 8), (2, 2), (18, 2)])
def test_base_alignment(address: int, align: int) -> None:
    assert x_of(plan_for((4, 64), address=address)).align == align


@pytest.mark.parametrize(("n", "align"), [(64, 16), (4, 8), (2, 4), (7, 2)])
def test_row_alignment(n: int, align: int) -> None:
    assert x_of(plan_for((4, n))).row_align == align


def test_last_dim_must_be_contiguous() -> None:
    with pytest.raises(ValueError) as caught:
        plan_for((4, 64), (1, 4))
    assert str(caught.value) == (
        "cute.rmsnorm: argument `x` has stride 4 in its last dim, expected 1. "
        "Other dims may have any stride; call .contiguous() where you accept the copy.\n"
        "  x: bfloat16[4, 64]   declared T[*m n]\n"
        "  bound so far: *m=(4,), n=64, T=bfloat16"
    )


def test_too_many_sizes_fall_back_to_a_dynamic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_static_seen", {})
    monkeypatch.setattr(dispatch, "STATIC_LIMIT", 2)
    bound = [bind(rmsnorm, {"x": Array((4, n), "bfloat16")}) for n in (64, 128, 256, 512, 64)]
    variants = [dispatch.choose(one, {}, SM90).variant for one in bound]
    assert [v.dims["n"] for v in variants] == [64, 128, None, None, 64]
    assert variants[2] == variants[3]


def test_what_is_always_static_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head size stays a constant in the kernel for any length, and does not use lengths up."""
    monkeypatch.setattr(dispatch, "_static_seen", {})
    monkeypatch.setattr(dispatch, "STATIC_LIMIT", 2)
    op = Op(
        "heads", inputs={"x": Tensor("*m n d", "T")}, outputs={"out": Tensor("*m n d", "T")}, dtypes={"T": FLOATS},
        static=("d", WhileFew("n")), reference=lambda xp, x: x, kernel="cute_ops.kernels:K",
    )  # fmt: skip
    sizes = [(5, 16), (5, 32), (5, 64), (6, 64), (7, 64), (8, 128)]
    variants = [dispatch.choose(bind(op, {"x": Array((3, *s), "float32")}), {}, SM90).variant for s in sizes]
    assert [tuple(v.dims.values()) for v in variants] == [
        (16, 5), (32, 5), (64, 5), (64, 6), (64, None), (128, None)
    ]  # fmt: skip
    assert variants[-1].tensors["x"].shape == (None, None, 128)  # type: ignore[union-attr]


def test_sizes_of_expressions_are_constants_where_their_names_are() -> None:
    """A name that only a product binds may be static, too."""
    op = Op(
        "tied", inputs={"q": Tensor("g*r d", "T"), "k": Tensor("g d/2 3", "T"), "scale": Tensor("g+1 ceil(d/4)", "T")},
        outputs={"out": Tensor("r 2d", "T")}, dtypes={"T": FLOATS}, static=("r", "d"), kernel="cute_ops.kernels:K",
        reference=lambda xp, q, *_: q,
    )  # fmt: skip
    shapes = {"q": (8, 6), "k": (2, 3, 3), "scale": (3, 2)}
    variant = plan(bind(op, {n: Array(s, "float32") for n, s in shapes.items()}), {}, SM90).variant
    assert variant.dims == {"r": 4, "d": 6}
    assert {n: key and key.shape for n, key in variant.tensors.items()} == {
        "q": (None, 6), "k": (None, 3, 3), "scale": (None, 2), "out": (4, 12),
    }  # fmt: skip


def test_a_variant_survives_json() -> None:
    variant = plan_for((2, 3, 64)).variant
    again = Variant.from_json(variant.text)
    assert again == variant and again.symbol == variant.symbol


def test_every_field_changes_the_name() -> None:
    variant = plan_for((4, 64)).variant
    other = {
        "op": "o", "kernel": "m:K", "arch": "sm_80", "names": variant.names[::-1], "args": variant.args[::-1],
        "static": (("n", 65),), "attributes": (("eps", 1e-5),), "settings": (("threads", 1),), "toolchain": ("0", "0"),
        "sources": "0", "declared": ("a",),
    }  # fmt: skip
    assert set(other) == set(variant._fields)
    names = {variant._replace(**{field: value}).symbol for field, value in other.items()}
    assert len(names | {variant.symbol}) == len(other) + 1


def test_what_is_written_comes_twice_and_numbers_come_last() -> None:
    """To XLA the new value of an input is a result: its call has the same memory as an argument and as a result."""
    rows, gain = Array((4, 64), "bfloat16"), Array((), "float32")
    given = {"state": rows, "x": rows, "gain": gain}
    first, other = (plan(bind(writing.follow, given, {"keep": value}), {}, SM90).variant for value in (0.5, math.nan))
    assert first.names == ("state", "x", "gain", "out", "state", "keep")
    assert [key and key.layout for key in first.args] == ["flat"] * 5 + ["number"]
    assert first.args[0] is first.args[4] and first.attributes == ()
    assert first.symbol == other.symbol, "one kernel for all values"
    assert Variant.from_json(first.text) == first


def test_what_writes_nothing_has_the_name_that_it_had() -> None:
    variant = plan_for((4, 64)).variant
    assert variant.names == ("x", "weight", "bias", "out")
    assert "number" not in variant.text and set(variant._fields) == set(json.loads(variant.text))


TABLE = Op(
    "table", inputs={"table": Tensor("*#m r", "T"), "x": Tensor("*m r", "T")}, outputs={"out": Tensor("*m r", "T")},
    dtypes={"T": FLOATS}, static=("r",), reference=lambda xp, table, x: x,
    kernel="cute_ops.kernels.norm.rmsnorm:RMSNorm",
)  # fmt: skip


@pytest.mark.parametrize(
    ("lead", "own", "shapes"),
    [
        ((), (), {"table": (1, 4), "x": (1, 4)}),
        ((2, 3, 5), (), {"table": (1, 4), "x": (30, 4)}),
        ((2, 3, 5), (5,), {"table": (5, 4), "x": (6, 5, 4)}),
        ((2, 3, 5), (1, 3, 5), {"table": (15, 4), "x": (2, 15, 4)}),
        ((2, 3, 5), (2, 3, 5), {"table": (30, 4), "x": (30, 4)}),
        ((1, 3, 1), (3, 1), {"table": (3, 4), "x": (3, 4)}),
    ],
)
def test_compact_leading_dims_fold(lead: tuple[int, ...], own: tuple[int, ...], shapes: dict) -> None:
    bound = bind(TABLE, {"table": Array((*own, 4), "float32"), "x": Array((*lead, 4), "float32")})
    assert folded(bound) == shapes
    again = bind(TABLE, {name: Array(shape, "float32") for name, shape in shapes.items()})
    assert again.rows == bound.rows


CROSS = Op(
    "cross", inputs={"x": Tensor("*m n", "T"), "table": Tensor("*#p n", "T"), "y": Tensor("*p n", "T")},
    outputs={"out": Tensor("*m n", "T")}, dtypes={"T": FLOATS}, reference=lambda xp, x, table, y: x,
    kernel="cute_ops.kernels:K",
)  # fmt: skip


def test_leading_dims_merge_and_fold_by_name() -> None:
    x, table, y = (Array((*lead, 64), "float32") for lead in ((2, 3), (7,), (5, 7)))
    bound = bind(CROSS, {"x": x, "table": table, "y": y})
    assert (bound.dims["m"], bound.dims["p"], bound.leading, bound.rows) == ((2, 3), (5, 7), "m", 6)
    assert bound.outputs["out"] == x
    assert folded(bound) == {"x": (6, 64), "table": (7, 64), "y": (5, 7, 64)}
    # Rows of x have a stride, those of y do not: only x's leading dims are merged.
    found = plan(bound, {"x": Memory((3 * 128, 128, 1))}, SM90)
    assert found.views == {"x": ((6, 64), (128, 1)), "out": ((6, 64), (64, 1))}
    assert {n: key and key.layout for n, key in found.variant.tensors.items()} == {
        "x": "strided", "table": "flat", "y": "flat", "out": "flat"
    }  # fmt: skip
    assert {n: a and a.shape for n, a in resized(bound, 9).inputs.items()} == {
        "x": (1, 9, 64), "table": (7, 64), "y": (5, 7, 64)
    }  # fmt: skip


def test_what_broadcasts_keeps_its_own_leading_dims() -> None:
    bound = bind(TABLE, {"table": Array((1, 5, 4), "float32"), "x": Array((3, 5, 4), "float32")})
    found = plan(bound, {"table": Memory((40, 8, 1)), "x": Memory((5 * 12, 12, 1))}, SM90)
    assert found.views == {"x": ((15, 4), (12, 1)), "out": ((15, 4), (4, 1))}
    table = found.variant.tensors["table"]
    assert table is not None and (table.layout, table.shape) == ("strided", (None, None, 4))


def test_a_table_that_broadcasts_along_an_inner_dim_is_read_in_place() -> None:
    """Rows of the op go through it as through a whole one, with a stride of zero where it has one row for many."""
    bound = bind(TABLE, {"table": Array((3, 1, 4), "float32"), "x": Array((3, 5, 4), "float32")})
    assert plan(bound, {}, SM90).views == {"table": ((3, 5, 4), (4, 0, 1))}
    bound = bind(TABLE, {"table": Array((1, 3, 1, 4), "float32"), "x": Array((2, 3, 5, 4), "float32")})
    found = plan(bound, {"table": Memory((99, 8, 4, 1)), "x": Memory((60, 20, 4, 1))}, SM90)
    assert found.views == {"table": ((3, 5, 4), (8, 0, 1))}
    table = found.variant.tensors["table"]
    assert table is not None and (table.layout, table.row_align) == ("strided", 16)


@pytest.mark.parametrize(
    ("x", "shape", "contiguous", "view"),
    [
        ((8, 1), (None, None), -1, None),
        ((1, 6), (None, None), -2, ((8, 6), (6, 1))),
        ((1, 9), (None, None), -2, ((8, 6), (9, 1))),
    ],
)
def test_one_of_several_dims_is_contiguous(x: tuple[int, ...], shape: tuple, contiguous: int, view: Any) -> None:
    """The key says which; what is no row-major array goes in as the view that is one."""
    arrays = {"x": Array((6, 8), "float32"), "w": Array((8, 4), "float32"), "bias": Array((4,), "float32")}
    memory = {"x": Memory(x), "w": Memory((1, 8)), "bias": Memory((3,))}
    found = plan(bind(layouts.by_columns, arrays), memory, SM90)
    key, w, bias = (found.variant.tensors[name] for name in ("x", "w", "bias"))
    assert key is not None and w is not None and bias is not None
    assert (key.shape, key.contiguous, found.views.get("x")) == (shape, contiguous, view)
    assert (w.contiguous, w.layout, found.views["w"]) == (-2, "flat", ((4, 8), (8, 1)))
    assert bias.layout == "scattered" and not found.copies
    assert Variant.from_json(found.variant.text) == found.variant


def test_leading_dims_merge_into_a_contiguous_one() -> None:
    arrays = {"x": Array((2, 1, 3, 8), "float32"), "w": Array((8, 4), "float32"), "bias": Array((4,), "float32")}
    found = plan(bind(layouts.by_columns, arrays), {"x": Memory((3, 99, 1, 6))}, SM90)
    assert found.views["x"] == ((8, 6), (6, 1)) and found.views["out"] == ((6, 4), (4, 1))
    # One row of an outer group is no contiguous dim where the other rows are apart.
    bound = bind(layouts.by_columns, {**arrays, "x": Array((6, 1, 8), "float32")})
    with pytest.raises(ValueError, match=r"argument `x` has strides \(4, 1, 24\), expected 1 in k or m\."):
        plan(bound, {"x": Memory((4, 1, 24))}, SM90)


APART = Memory((2 * 639 * 440, 440, 1))  # every other example of a batch


def test_rows_that_no_stride_steps_over_are_refused_as_planned() -> None:
    """By name, and only where our kernel is asked for: the framework's product takes them."""
    arrays = {"x": Array((2, 639, 440), "bfloat16"), "weight": Array((2344, 440), "bfloat16")}
    with pytest.raises(ValueError) as caught:
        choose(bind(linear, arrays, {"fused": "always"}), {"x": APART}, SM90)
    assert str(caught.value).splitlines()[0] == (
        "cute.linear: argument `x` has strides (562320, 440, 1), expected one that steps over all rows of [2, 639, "
        "440], as if they were a matrix; call .contiguous() where you accept the copy. With fused='auto' the "
        "framework's product takes it anywhere."
    )
    for fused in ("auto", "never"):
        assert fallback(bind(linear, arrays, {"fused": fused}), {"x": APART}, SM90) is (
            linear.fallback and linear.fallback.program
        )
    for x in (Memory((639 * 440, 440, 1)), Memory((639 * 880, 880, 1)), Memory((1, 880, 1), 8)):
        shape = (1, 639, 440) if x.strides[0] == 1 else (2, 639, 440)
        call = bind(linear, arrays | {"x": Array(shape, "bfloat16")}, {"fused": "always"})
        assert fallback(call, {"x": x}, SM90) is None and choose(call, {"x": x}, SM90)


def test_a_merged_tensor_is_a_matrix_whatever_others_allow() -> None:
    """A slice of rows is passed by one stride, also beside a residual whose leading dims stay apart."""
    op = fused_linear(lambda xp, acc, r: acc + r, name="add_r", operands={"r": "*m n"})
    arrays = {
        "x": Array((2, 3, 64), "bfloat16"),
        "weight": Array((64, 64), "bfloat16"),
        "r": Array((2, 3, 64), "float32"),
    }
    memory = {"x": Memory((3 * 128, 128, 1)), "r": Memory((64, 128, 1))}
    found = plan(bind(op, arrays, {"fused": "always"}), memory, SM90)
    assert found.views == {"x": ((6, 64), (128, 1))}
    x, r = (found.variant.tensors[name] for name in ("x", "r"))
    assert x is not None and r is not None and (x.rank, r.rank, r.layout) == (2, 3, "strided")


@pytest.mark.parametrize(
    ("x", "y", "problem"),
    [
        (Memory((8, 1)), Memory((1, 4)), ""),
        (Memory((12, 1)), Memory((1, 8)), ""),
        (Memory((9, 1)), Memory((1, 4)), "`x` has a stride of 9 elements, expected a multiple of 4: pad its rows."),
        (Memory((8, 1), 8), Memory((1, 4)), "`x` lies 8 bytes off a multiple of 16 bytes."),
        (Memory((8, 1)), Memory((8, 1)), "copy"),
        (Memory((8, 1)), Memory((1, 5)), "copy"),
        (Memory((8, 1)), Memory((1, 4), 4), "copy"),
    ],
)
def test_what_is_not_aligned_is_refused_or_copied(x: Memory, y: Memory, problem: str) -> None:
    bound = bind(layouts.aligned, {"x": Array((4, 8), "float32"), "y": Array((4, 8), "float32")})
    if problem not in ("", "copy"):
        with pytest.raises(ValueError, match=re.escape(problem)):
            plan(bound, {"x": x, "y": y}, SM90)
        return
    found = plan(bound, {"x": x, "y": y}, SM90)
    assert found.copies == ({"y": (1, 4)} if problem else {})
    keys = [found.variant.tensors[name] for name in ("x", "y")]
    assert [(key.align, key.row_align, key.contiguous) for key in keys if key] == [(16, 16, -1), (16, 16, -2)]


def test_a_copy_must_be_aligned_too() -> None:
    bound = bind(layouts.aligned, {"x": Array((3, 8), "float32"), "y": Array((3, 8), "float32")})
    for memory in ({}, {"y": Memory((1, 3))}):
        with pytest.raises(ValueError, match="`y` has a stride of 3 elements, expected a multiple of 4: pad its rows"):
            plan(bound, memory, SM90)


def test_a_kernel_gets_dims_in_declared_order(tmp_path: Path) -> None:
    variant = plan(bind(layouts.turned, {"x": Array((9, 3, 5), "float32")}), {}, SM90).variant
    with pytest.raises(CompileError, match=r"\(None, 3, 5\): \[None, 3, 5\], \[1, None, None\]"):
        worker.compile(variant, tmp_path / "kernel.o")


@pytest.mark.parametrize("op", [op for op in (*PRODUCTS, *ATTENTION) if op.fallback], ids=lambda op: op.name)
def test_what_may_run_by_the_framework_is_planned_for_a_gpu(op: Op) -> None:
    """Whether the kernel runs, and from which copies, is known of every such op, a product or not."""
    for case in op.cases[:2]:
        dtypes = {variable: choices[0] for variable, choices in op.dtypes.items()}
        given = testing.inputs(op, case._replace(dtypes={**dtypes, **case.dtypes}), dtypes["T"])
        arrays = {name: Array(a.shape, a.dtype.name) for name, a in given.items() if a is not None}
        binding = bind(op, arrays, {**case.attrs, "fused": "auto"})
        places = {name: Memory(compact(array.shape)) for name, array in arrays.items()}
        assert isinstance(dispatch.realigned(binding, places, SM90), dict)
        fallback(binding, places, SM90)
