"""Where attention's kernel runs, and where the framework's functions do."""

from __future__ import annotations

import pytest

from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit.layout import Memory
from cute_ops.jit.target import parse
from cute_ops.ops.attention.attention import attention, attention_bwd
from cute_ops.ops.attention.attention_cached import attention_cached


def runs_by_framework(dtype: str, arch: str | None, fused: str = "auto") -> bool:
    shapes = {"q": (2, 9, 4, 32), "k": (2, 9, 2, 32), "v": (2, 9, 2, 32)}
    binding = bind(attention, {name: Array(shape, dtype) for name, shape in shapes.items()}, {"fused": fused})
    memory = {name: Memory((9 * shape[2] * 32, shape[2] * 32, 32, 1)) for name, shape in shapes.items()}
    return dispatch.fallback(binding, memory, arch and parse(arch)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "arch", "by_framework"),
    [
        ("bfloat16", "sm_90a", False), ("float16", "sm_90a", False), ("float32", "sm_90a", True),
        ("bfloat16", "sm_80", False), ("bfloat16", "sm_100a", False), ("float32", "sm_80", True),
        ("float32", None, False),
    ],
)  # fmt: skip
def test_where_the_framework_computes(dtype: str, arch: str | None, by_framework: bool) -> None:
    """On a CPU the definition runs."""
    assert runs_by_framework(dtype, arch) == by_framework
    assert runs_by_framework(dtype, arch, "never")


@pytest.mark.parametrize(
    ("dtype", "caches", "arch", "by_framework"),
    [
        ("bfloat16", "bfloat16", "sm_90a", False), ("bfloat16", "float8_e4m3fn", "sm_90a", False),
        ("float16", "float8_e4m3fn", "sm_89", False), ("float16", "float8_e4m3fn", "sm_80", True),
        ("float32", "float32", "sm_90a", True), ("float32", "float8_e4m3fn", "sm_90a", True),
    ],
)  # fmt: skip
def test_where_the_framework_attends_to_caches(dtype: str, caches: str, arch: str, by_framework: bool) -> None:
    arrays = {"q": Array((2, 9, 4, 32), dtype), **dict.fromkeys("kv", Array((2, 16, 2, 32), caches))}
    binding = bind(attention_cached, arrays | {"lengths": Array((2,), "int32")}, {"causal": True})
    memory = {name: Memory((array.shape[1] * 64, 64, 32, 1)) for name, array in arrays.items()}
    assert (dispatch.fallback(binding, memory, parse(arch)) is not None) == by_framework


def test_a_kernel_that_is_asked_for() -> None:
    assert not runs_by_framework("bfloat16", "sm_90a", "always")
    with pytest.raises(ValueError, match=r"attribute `fused` is 'always', but no kernel takes float32; 'auto' does\."):
        runs_by_framework("float32", "sm_90a", "always")
    assert attention.attrs["fused"] == attention_bwd.attrs["fused"] == "auto"
