"""``verify --interpret``: an author's kernel on a CPU, right, wrong and beyond what the interpreter knows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_ops.calls import lookup
from cute_ops.tools.interpret import interpret

FOLDER = Path(__file__).parents[2] / "examples" / "bring_a_kernel"
LENGTHS = (1, 31, 32, 100, 128, 129, 300)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Path]:
    """A folder for a kernel whose module is forgotten again."""
    names, path = {*sys.modules}, [*sys.path]
    yield tmp_path
    sys.path[:] = path
    for name in {*sys.modules} - names:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in (sys.modules[name].__file__ or ""):
            del sys.modules[name]


def problems(folder: Path, name: str, **edits: str) -> list[str]:
    """What is wrong with the row sum after a change to its kernel."""
    kernel = (FOLDER / "any_row_sum_kernel.py").read_text(encoding="utf-8")
    for old, new in (edit.split(" -> ") for edit in edits.values()):
        assert old in kernel
        kernel = kernel.replace(old, new)
    (folder / f"{name}_kernel.py").write_text(kernel, encoding="utf-8")
    declared = (FOLDER / "any_row_sum.py").read_text(encoding="utf-8").replace("any_row_sum_kernel", f"{name}_kernel")
    (folder / f"{name}.py").write_text(declared, encoding="utf-8")
    op = lookup.find(f"{folder / name}.py:any_row_sum")
    return [found.problem for found in interpret([op], ("float32",), {"n": LENGTHS}) if found.problem]


def test_the_kernel_is_right(apart: Path) -> None:
    assert problems(apart, "sum_as_it_is") == []


@pytest.mark.parametrize(("name", "edit", "text"), [
    ("sum_past_the_end", "idx < N: -> idx <= N:", r"IndexError: float32 at .*outside of all tensors"),
    ("sum_of_less", "if idx < N: -> if idx < N - 1:", r"output out: error .* exceeds"),
    ("sum_not_stored", "        if lane == 0:\n            output -> \
        if lane == 32:\n            output", r"bytes of out are stored \{0\} times"),
    ("sum_stored_by_all", "        if lane == 0:\n            output -> \
        if lane >= 0:\n            output", r"stored \{32\} times|Race: two threads store to one place"),
])  # fmt: skip
def test_a_wrong_kernel_is_found(name: str, edit: str, text: str, apart: Path) -> None:
    found = problems(apart, name, edit=edit)
    assert len(found) >= len(LENGTHS) - 2 and all(re.search(text, each) for each in found), found


def test_a_missing_barrier_is_found(apart: Path) -> None:
    """In the calls that are watched."""
    found = problems(apart, "sum_without_barrier", edit="    cute.arch.sync_threads()\n -> ")
    assert found and all("Race" in each for each in found), found


def test_rows_of_whole_vectors_have_every_length() -> None:
    """The last dim is ``8v``: 8 to 296 elements."""
    found = list(interpret([lookup.find(f"{FOLDER / 'relu'}.py:relu")], ("float16",)))
    assert [verdict.case.partition(" ")[0] for verdict in found] == [f"v={v}" for v in range(1, 38)]
    assert not [verdict for verdict in found if verdict.problem]


def test_where_refuses_two_dtypes_as_the_compiler_does(apart: Path) -> None:
    for name, kernel in (
        ("relu_of_an_int", "cute.where(a > 0, a, 0)"),
        ("relu_of_a_float", "cute.where(a > 0, a, 0.0)"),
    ):
        source = (FOLDER / "relu_kernel.py").read_text(encoding="utf-8")
        changed = source.replace("cute.where(a > 0, a, cute.full_like(a, 0))", kernel)
        assert changed != source
        (apart / f"{name}_kernel.py").write_text(changed, encoding="utf-8")
        declared = (FOLDER / "relu.py").read_text(encoding="utf-8").replace('"relu_kernel', f'"{name}_kernel')
        (apart / f"{name}.py").write_text(declared, encoding="utf-8")
        op = lookup.find(f"{apart / name}.py:relu")
        found = {dtype: [v.problem for v in interpret([op], (dtype,), {"v": (5,)})] for dtype in ("float32", "float16")}
        kind = "int32" if name == "relu_of_an_int" else "float32"
        refused = "ValueError: cute.where: x and y must have the same dtype, but got {} and {}"
        for dtype, problems in found.items():
            wanted = "" if dtype == kind else refused.format(dtype, kind)
            assert problems and all((problem or "").startswith(wanted) for problem in problems), problems
            assert bool(wanted) == bool(problems[0])


def test_what_the_interpreter_does_not_know_is_named() -> None:
    (verdict,) = interpret([lookup.find(f"{FOLDER / 'tiled_add'}.py:tiled_add")], ("float32",))
    assert verdict.problem.startswith("cute.make_ordered_layout is not known to the interpreter")


@pytest.mark.parametrize("name", ["row_sum", "any_row_sum", "planned_relu"])
def test_brought_kernels_are_right_at_every_length(name: str) -> None:
    found = [
        *interpret([lookup.find(f"{FOLDER / name}.py:{name}")], sizes={"n": (1, 2, 8, 31, 33, 127, 129, 256, 300)})
    ]
    assert len(found) >= 9 and not [each for each in found if each.problem]
