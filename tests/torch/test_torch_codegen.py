"""Generated functions: their source shows in tracebacks and debuggers, and leaves with them."""

from __future__ import annotations

import gc
import inspect
import linecache
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import Op
from cute_ops.jit import cache
from cute_ops.ops import OPS
from cute_ops_torch.host import codegen
from cute_ops_torch.host.launch import Launcher

rmsnorm = OPS[0]


def named() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<cute_ops ")}


def generated() -> set[str]:
    gc.collect()
    return named()


def make(label: str) -> Callable[..., Any]:
    make = codegen.maker(codegen.GUARDED, label, ["_two"], name="own", parameters="x", arguments="x", condition="x > 0",
                         result=f"_two / (x - {len(label)})")  # fmt: skip
    made: Callable[..., Any] = make(_otherwise=abs, _two=2)
    return made


def test_a_traceback_shows_the_generated_line(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*tensors: torch.Tensor) -> None:
        raise RuntimeError("the kernel failed")

    monkeypatch.setattr(cache, "get", lambda variant: broken)
    launcher, x = Launcher(rmsnorm), torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="the kernel failed") as first:
        launcher.launch(x)
    with pytest.raises(RuntimeError, match="the kernel failed") as second:
        launcher.launch(x)
    linecache.checkcache()  # as a traceback does before it reads lines
    text = "".join(traceback.format_exception(first.value))
    assert 'File "<cute_ops rmsnorm.run' in text
    assert "    _kernel(x, _out0)\n" in text
    text = "".join(traceback.format_exception(second.value))
    assert 'File "<cute_ops rmsnorm.guarded' in text
    assert "    return _run(x)\n" in text


def test_a_public_function_has_source() -> None:
    source = inspect.getsource(cute_ops_torch.rmsnorm)
    assert source.startswith(
        "    def rmsnorm(x=_missing, weight=None, bias=None, eps=1e-06, weight_offset=0.0, "
        "*_more, out=None, **_others):\n"
    )
    assert cute_ops_torch.rmsnorm.__code__.co_filename.startswith("<cute_ops rmsnorm")


def test_a_file_name_stands_for_one_source() -> None:
    first, again = make("own.a"), make("own.a")
    assert first.__code__ is again.__code__
    other = codegen.maker(
        codegen.GUARDED, "own.a", [], name="own", parameters="x", arguments="x", condition="x", result="1"
    )
    names = {f.__code__.co_filename for f in (first, other(_otherwise=abs))}
    assert names == {"<cute_ops own.a>", "<cute_ops own.a 1>"}
    for name in names:
        assert "def own(x):\n" in "".join(linecache.getlines(name))


@pytest.mark.slow
def test_sources_leave_with_their_functions() -> None:
    before = generated()
    kept = make("own.kept")
    for k in range(2000):  # more than the cache of shared code holds
        make(f"own.{k}" + "x" * (k % 7))
    assert len(generated() - before) <= 1024 + 1
    assert "<cute_ops own.kept>" in generated()
    assert kept(-3) == 3
    codegen._shared.cache_clear()
    assert "<cute_ops own.kept>" in generated()
    del kept
    assert not {name for name in generated() if name.startswith("<cute_ops own.")}


def test_calls_of_new_shapes_generate_nothing(any_op: Op, compiled: Any, make_inputs: Callable[..., Any]) -> None:
    launcher = Launcher(any_op)
    launcher.launch(*make_inputs(any_op, (3, 2)))
    before = named()
    for m in range(4, 9):
        launcher.launch(*make_inputs(any_op, (m, 2)))
    assert named() <= before
