"""The pages on writing kernels: what they show is the examples' code, and each step's kernel works."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_ops import FLOATS, Array, Case, Op, Tensor, Tuning
from cute_ops.autotune.dispatch import foresee
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse
from cute_ops.ops.reduction.config import MAP, mapped

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import make_pictures
from make_pictures import kernel_calls, softcap, unit_norm

ROOT = Path(__file__).parents[2]
OURS = [softcap.softcap, softcap.softcap_bwd, unit_norm.unit_norm, unit_norm.unit_norm_bwd]
STEPS = [*make_pictures.steps()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for step in STEPS:
        sys.modules.pop(f"softcap_step_{step}", None)
    sys.modules.pop("scaled_kernel", None)


def accesses(op: Op, n: int, folder: Path) -> set[str]:
    """The kinds of loads and stores that the compiled kernel has."""
    inputs = {
        name: Array((33, n) if t.dims else (33,), "bfloat16" if t.dims else t.dtype) for name, t in op.inputs.items()
    }
    worker.compile(foresee(bind(op, inputs), {}, parse("sm_90a")).variant, folder / "kernel.so", dump=folder)
    (ptx,) = (path.read_text(encoding="utf-8") for path in folder.glob("*.ptx"))
    return {word for word in ptx.split() if word.startswith(("ld.global", "st.global"))}


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("own_kernel", "custom_op/softcap.py"), ("own_kernel", "custom_op/softcap_kernel.py"),
        ("row_kernel", "row_kernel/unit_norm.py"), ("row_kernel", "row_kernel/unit_norm_kernel.py"),
    ],
)  # fmt: skip
def test_pages_show_the_examples(page: str, file: str) -> None:
    shown = f"```python\n{(ROOT / 'examples' / file).read_text(encoding='utf-8')}```"
    assert shown in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_the_examples_agree_with_their_references(op: Op, dtype: str) -> None:
    for n in (1, 7, 64, 301):
        for layout in kernel_calls.LAYOUTS:
            kernel_calls.check(kernel_calls.made(op, 5, n, dtype, layout, np.random.default_rng(n)))


def test_the_row_function_of_the_kernels_page(folder: Path) -> None:
    (code,) = re.findall(
        r'```python\n("""scaled_kernel.py""".*?)```',
        (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    (folder / "scaled_kernel.py").write_text(code)
    rows = Tensor("*m n", "T")
    op = Op(
        "scaled", inputs={"x": rows, "scale": Tensor("*m", "float32")}, outputs={"out": rows}, dtypes={"T": FLOATS},
        reference=scaled, kernel="scaled_kernel:Scaled", tuning=Tuning(mapped, MAP),
        cases=(Case("some", {"m": (5,), "n": 64}),),
    )  # fmt: skip
    for n in (1, 7, 64, 301):
        for layout in kernel_calls.LAYOUTS:
            kernel_calls.check(kernel_calls.made(op, 5, n, "bfloat16", layout, np.random.default_rng(n)))


def scaled(xp: Any, x: Any, scale: Any) -> Any:
    return xp.astype(xp.astype(x, scale.dtype) * scale[..., None], x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "wide"), [(2, False), (3, False), (4, True)])
def test_every_step_works(step: int, wide: bool, folder: Path) -> None:
    op = make_pictures.op_of_step(step, folder)
    for n in (7, 64):
        for layout in kernel_calls.LAYOUTS:
            kernel_calls.check(kernel_calls.made(op, 5, n, "bfloat16", layout, np.random.default_rng(n)))
    line = make_pictures.row(step, op)
    assert line in make_pictures.PAGE.read_text(encoding="utf-8")
    found = accesses(op, 256, folder)
    assert found == ({"ld.global.v4.b32", "st.global.v4.b32"} if wide else {"ld.global.b16", "st.global.b16"})


@pytest.mark.slow
def test_the_row_kernel_moves_whole_vectors(tmp_path: Path) -> None:
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= accesses(unit_norm.unit_norm, 512, tmp_path)


def test_pictures_are_of_the_kernels(folder: Path) -> None:
    for name, text in make_pictures.pictures(folder).items():
        assert (make_pictures.PICTURES / name).read_text(encoding="utf-8") == text, (
            f"{name}: run python docs/make_pictures.py"
        )


@pytest.mark.parametrize(("page", "word"), [("own_kernel", ""), ("row_kernel", "unit_norm")])
def test_the_pages_show_the_measured_rates(page: str, word: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert f"\n\n{make_pictures.rates(word)}\n\n" in text, f"paste make_pictures.rates({word!r}) there"


def test_the_epilogue_is_the_soft_cap() -> None:
    code, shown = make_pictures.PAGE.read_text(encoding="utf-8").rpartition("```python\n")[2].partition("```")[0], {}
    exec(code, shown)
    product = torch.nn.functional.linear(shown["hidden"], shown["head"])
    torch.testing.assert_close(shown["logits"], 30 * torch.tanh(product / 30))
