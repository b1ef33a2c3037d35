"""Kernels that existed before, each as an op: the declarations, the kernels' arithmetic and their machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cute_ops import Array, Case, Op, Space, Tensor, Tuning
from cute_ops.autotune.dispatch import foresee
from cute_ops.calls import lookup
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.plan import plan, signature
from cute_ops.jit.target import parse
from cute_ops.tools.verify import installed, verify

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "bring_a_kernel"
PAGE = (ROOT / "docs" / "bring_a_kernel.md").read_text(encoding="utf-8")
SEED = """
    M, N = gA.shape
    ntiles = cute.ceil_div(N, bdimx)
    acc = 0.0
    for tile_idx in range(ntiles):
        idx = tile_idx * bdimx + tidx
        if idx < N:
            acc += gA[bidx, idx]
"""
RELU = """
    if cutlass.dynamic_expr(idx < total):
        a = gA[(None, (idx // n, idx % n))].load()
        gC[(None, (idx // n, idx % n))] = cute.where(a > 0, a, 0)
"""
NAMES = ("row_sum", "any_row_sum", "relu", "tiled_add", "tma_scale", "planned_relu")
TARGET = parse("sm_90a")


@pytest.fixture(autouse=True)
def _kernels_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program beside them; without this an op that a test declares depends on an earlier test's look-up."""
    monkeypatch.syspath_prepend(FOLDER)


def found(name: str) -> Op:
    return lookup.find(f"{FOLDER / name}.py:{name}")


@pytest.mark.parametrize("name", NAMES)
def test_verify_is_content_with_each(name: str) -> None:
    verdicts = [*verify([found(name)], installed())]
    assert verdicts and not [v for v in verdicts if v.problem]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "dtype", "wanted"), [
    ("any_row_sum", (2, 33, 1000), "bfloat16", {"ld.global.b16", "st.global.b16", "shfl.sync.bfly.b32"}),
    ("row_sum", (33, 1000), "float32", {"ld.global.b32", "st.global.b32", "shfl.sync.bfly.b32"}),
    ("relu", (33, 1000), "bfloat16", {"ld.global.v4.b32", "st.global.v4.b32"}),
    ("tiled_add", (2, 33, 256), "bfloat16", {"ld.global.b16", "st.global.b16"}),
    ("tma_scale", (2, 33, 256), "bfloat16", {
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint",
    }),
    ("planned_relu", (2, 33, 256), "bfloat16", {"ld.global.v4.b32", "st.global.v4.b32"}),
])  # fmt: skip
@pytest.mark.parametrize("fixed", [True, False])
def test_each_compiles_for_hopper(
    name: str, shape: tuple[int, ...], dtype: str, wanted: set[str], fixed: bool, tmp_path: Path
) -> None:
    """With a constant number of columns, and with the kernel that serves any."""
    op = found(name)
    variant = foresee(bind(op, {each: Array(shape, dtype) for each in op.inputs}), {}, TARGET, fixed).variant
    worker.compile(variant, tmp_path / "kernel.so", dump=tmp_path)
    (ptx,) = (p.read_text(encoding="utf-8") for p in tmp_path.glob("*.ptx"))
    assert wanted <= {word for word in ptx.split() if word.count(".") > 1}


def test_the_row_sum_is_the_introductions() -> None:
    assert SEED in (FOLDER / "row_sum_kernel.py").read_text(encoding="utf-8")


def test_the_relu_is_the_guides() -> None:
    """But for a zero of the vector's type."""
    assert RELU in (FOLDER / "relu_kernel.py").read_text(encoding="utf-8").replace("cute.full_like(a, 0)", "0")


def test_the_page_shows_the_files() -> None:
    for path in sorted(FOLDER.glob("*.py")):
        assert f"```python\n{path.read_text(encoding='utf-8')}```" in PAGE, path.name


X = Tensor("*m n", "float32")


def op_with(tuning: Tuning, **others: Any) -> Op:
    return Op(
        "clumsy", inputs={"x": X}, outputs={"out": X}, dtypes={}, reference=lambda xp, x: x,
        kernel="planned_relu_kernel:planned_relu", tuning=tuning, cases=(Case("some", {"m": (4,), "n": 8}),), **others,
    )  # fmt: skip


def problem_of(op: Op) -> Any:
    return signature(bind(op, {"x": Array((4, 8), "float32")}), {}, TARGET).problem


def test_any_frozen_dataclass_is_a_config() -> None:
    op = found("planned_relu")
    planned = plan(bind(op, {"x": Array((4, 512), "bfloat16")}), {}, TARGET)
    assert dict(planned.variant.config) == {"threads": 128, "vec": 8}
    space = op.space
    assert space is not None
    assert {(c["threads"], c["vec"]) for c in space.others(problem_of(op), {})} == {
        (threads, vec) for threads in (128, 256, 512) for vec in (4, 2, 1)
    }


@pytest.mark.parametrize(("heuristic", "kind", "text"), [
    (lambda p: None, TypeError, "op clumsy: its config must be a dataclass or a mapping, got None"),
    (lambda p: {"tile": (32, 64)}, TypeError,
     "op clumsy: field tile of its config is (32, 64), expected one field for each of its numbers"),
    (lambda p: {"share": 0.5}, TypeError,
     "op clumsy: field share of its config is 0.5, expected an int, a bool or a str"),
    (lambda p: {"rows": p.dims["k"]}, KeyError,
     "op clumsy: its heuristic looked up 'k', and there are dims m, n; tensors x, out"),
])  # fmt: skip
def test_a_wrong_heuristic_is_named(heuristic: Any, kind: type[Exception], text: str) -> None:
    op = op_with(Tuning(heuristic))
    with pytest.raises(kind) as caught:
        plan(bind(op, {"x": Array((4, 8), "float32")}), {}, TARGET)
    assert caught.value.args[0] == text


def test_a_wrong_space_is_named() -> None:
    space = Space(lambda p, c: [{"threads": c["warps"] * 32}], lambda p, c: c["shared"])
    with pytest.raises(KeyError) as caught:
        space.others(problem_of(op_with(Tuning())), {"threads": 128}, "clumsy")
    assert caught.value.args[0] == (
        "op clumsy: its search space looked up 'warps', and there are dims m, n; tensors x, out; the config threads"
    )
    with pytest.raises(KeyError, match="op clumsy: the needs of its configs looked up 'shared', and there are"):
        space.needed(problem_of(op_with(Tuning())), {"threads": 128}, "clumsy")


def test_a_kernel_that_looks_up_another_field_is_told_which_there_are() -> None:
    variant = plan(
        bind(op_with(Tuning(lambda p: {"threads": 128})), {"x": Array((4, 8), "float32")}), {}, TARGET
    ).variant
    for mapping, name, text in (
        (variant.config, "thread", "op clumsy: its config has no 'thread' (did you mean threads?), but threads"),
        (variant.attrs, "eps", "op clumsy: its attributes have no 'eps', but nothing"),
        (variant.dims, "N", "op clumsy: its dims have no 'N' (did you mean n?), but n"),
        (variant.tensors, "y", "op clumsy: its tensors have no 'y', but x, out"),
    ):
        with pytest.raises(KeyError) as caught:
            mapping[name]
        assert caught.value.args[0] == text


def test_flops_and_bytes_are_the_declarations() -> None:
    from cute_ops.autotune.rows import bytes_moved, flops

    binding = bind(op_with(Tuning()), {"x": Array((2, 4, 8), "float32")})
    assert (flops(binding), bytes_moved(binding)) == (None, 2 * 64 * 4)
    counted = op_with(Tuning(), flops=lambda d, attrs: 3 * d["m"] * d["n"], bytes=lambda d, attrs: 5 * d["m"])
    binding = bind(counted, {"x": Array((2, 4, 8), "float32")})
    assert (flops(binding), bytes_moved(binding)) == (3 * 64, 5 * 8)
