"""``verify`` and ``bench`` of a file of ``kernel_fn``, ``reference_fn`` and ``get_inputs``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

from cute_ops.cli import author, calls
from cute_ops.tools.contract import Contract, of_module, verify

FILE = "examples/bring_a_kernel/contract_relu.py"


def silu(x: Any) -> Any:
    return torch.nn.functional.silu(x)


def inputs() -> list[Any]:
    return [torch.linspace(-4, 4, 64).to(torch.bfloat16).reshape(4, 16)]


def problem(kernel: Any, reference: Any = silu, get: Any = inputs, repeats: int = 3) -> str:
    (verdict,) = verify(Contract("file", kernel, reference, get), repeats)
    return verdict.problem


def written(x: Any) -> Any:
    out = silu(x)
    x[0, 0] = 1
    return out


def test_a_right_kernel() -> None:
    assert problem(silu) == ""
    assert problem(lambda x: x / (1 + torch.exp(-x.float())).to(x.dtype)) == ""
    assert problem(lambda x, n: (x, n + x), lambda x, n: (x, x + n), lambda: [torch.ones(3), 2]) == ""


def test_numpy_arrays_and_scalars() -> None:
    if not hasattr(np.ones(1), "device"):
        pytest.skip("arrays of NumPy 1 have no device")
    assert problem(np.tanh, np.tanh, lambda: [np.ones(3, np.float32)]) == ""


@pytest.mark.parametrize(("kernel", "text"), [
    (lambda x: silu(x) * 1.1, "kernel_fn: output 0: error"),
    (lambda x: silu(x).float(), "kernel_fn: output 0 is float32, that of reference_fn bfloat16"),
    (lambda x: silu(x)[:2], "kernel_fn: output 0 is (2, 16), not (4, 16)"),
    (lambda x: (silu(x), x), "kernel_fn returns 2 outputs, reference_fn 1"),
    (written, "kernel_fn: input 0 was written to"),
    (lambda x: torch.full_like(x, torch.nan), "kernel_fn: output 0 has NaN where the reference has none"),
])  # fmt: skip
def test_a_wrong_kernel(kernel: Any, text: str) -> None:
    assert problem(kernel).startswith(text)


def test_a_race() -> None:
    count = iter(range(100))

    def racing(x: Any) -> Any:
        return silu(x) + float(next(count) == 2)

    assert problem(racing, repeats=5) == "kernel_fn: output 0 differs from a repeated call: a race?"


def test_inputs_that_cannot_be_made() -> None:
    def fails() -> list[Any]:
        raise RuntimeError("no GPU")

    assert problem(silu, get=fails) == (
        "RuntimeError: get_inputs() failed, which needs a GPU if it makes tensors there: no GPU"
    )
    assert problem(silu, get=lambda: [3]) == "TypeError: get_inputs() returned no array, but [3]"


def test_only_a_file_of_all_three_is_one() -> None:
    assert of_module(SimpleNamespace(kernel_fn=silu, reference_fn=silu)) is None  # type: ignore[arg-type]
    assert calls.contract_of("examples/bring_a_kernel/row_sum.py") is None
    assert calls.contract_of("rmsnorm") is None
    assert calls.contract_of(FILE) is not None


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        author.verify(FILE, repeats=2)
    assert ended.value.exit_code == 0
    assert "1 of 1 right, 2 calls (kernel_fn against reference_fn)" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="declares no op: its get_inputs"):
        author.verify(FILE, dtype=["float32"])
    fake = SimpleNamespace(
        available=lambda: True, copy_rate=lambda: 4000.0,
        functions=lambda inputs, named: {name: SimpleNamespace(us=5.0, low=4, high=6, rate=1000.0) for name in named},
    )  # fmt: skip
    monkeypatch.setattr(author, "import_module", lambda name: fake)
    author.bench(FILE, out=tmp_path)
    text = capsys.readouterr().out
    assert "kernel_fn" in text and "reference_fn" in text and "25%" in text
