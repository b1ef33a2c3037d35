"""``probe``: no problems here, and one useful sentence for each problem."""

from __future__ import annotations

import jax
import pytest

import cute_ops_jax
from cute_ops.jit import toolchain
from cute_ops_jax.primitive import ffi_check


def test_all_is_well() -> None:
    assert cute_ops_jax.probe() == []
    assert cute_ops_jax.probe() == []  # each makes a target of its own


def test_old_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 0))
    (problem,) = cute_ops_jax.probe()
    assert problem.endswith("is too old for jax-tvm-ffi: pip install 'jax>=0.9.1'")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (None, "jax-tvm-ffi is not installed: pip install 'cute-ops[jax]'"),
        ("0.1.2.post1", "jax-tvm-ffi 0.1.2.post1 is too old: pip install 'jax-tvm-ffi>=0.1.3'"),
    ],
)
def test_wrong_bridge(version: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "version", lambda name: version)
    assert cute_ops_jax.probe() == [text]
    with pytest.raises(RuntimeError, match="kernels cannot run: jax-tvm-ffi"):
        ffi_check.require.__wrapped__()


def test_a_bridge_that_xla_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise RuntimeError("No FFI handler registered for cute_ops_probe\nstack")

    monkeypatch.setattr(ffi_check, "_call", refuse)
    (problem,) = cute_ops_jax.probe()
    assert "do not fit together (RuntimeError: No FFI handler registered for cute_ops_probe): pip install" in problem
    monkeypatch.setattr(ffi_check, "_call", lambda: False)
    assert cute_ops_jax.probe() == ["XLA's FFI did not call a registered function"]


def test_a_jax_that_nobody_tried_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new jax is tried once, while a program is traced; without a CPU backend to try on, it is trusted."""
    tried = []
    called = ffi_check._call

    def call() -> bool:
        tried.append(called())
        return tried[-1]

    monkeypatch.setattr(ffi_check, "_call", call)
    jax.jit(lambda x: ffi_check.require.__wrapped__() or x).lower(1.0)
    assert tried == []
    monkeypatch.setattr(jax, "__version_info__", ffi_check.UNKNOWN_JAX)
    jax.jit(lambda x: ffi_check.require.__wrapped__() or x).lower(1.0)
    assert tried == [True]
    monkeypatch.setattr(ffi_check, "_call", lambda: False)
    with pytest.raises(RuntimeError, match=r"^cute_ops_jax: kernels cannot run: XLA's FFI did not call a registered"):
        ffi_check.require.__wrapped__()
    monkeypatch.setattr(ffi_check, "_has_cpu", lambda: False)
    ffi_check.require.__wrapped__()
