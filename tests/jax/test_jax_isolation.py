"""Importing and using the adapter on a CPU needs no torch, no compiler and no TVM-FFI.

The check runs in a fresh interpreter where they cannot be imported; a meta-test shows that it can fail.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cute_ops_jax

ROOT = Path(cute_ops_jax.__file__).parents[1]
FOREIGN = ("torch", "cutlass", "tvm_ffi", "jax_tvm_ffi")
BLOCK = f"""
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FOREIGN!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
"""
USE = """
import jax, cute_ops_jax
x = jax.numpy.ones((2, 6))
print(jax.jit(jax.value_and_grad(lambda x: cute_ops_jax.rmsnorm(x).sum()))(x)[0])
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_adapter_needs_only_jax() -> None:
    result = run_blocked(USE)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(12)


@pytest.mark.parametrize("name", FOREIGN)
def test_the_check_can_fail(name: str) -> None:
    result = run_blocked(f"import {name}" + USE)
    assert result.returncode != 0
    assert f"blocked: {name}" in result.stderr


@pytest.mark.slow
def test_what_the_import_loads(what_loads: Callable[[str, str, int], str]) -> None:
    """Rooms of ours, and nothing of others: what is added here is paid at every start."""
    program = what_loads("jax", "cute_ops_jax", 223)
    core = "autotune composite constants declaration env errors expressions files garbage hardware jit kernels mods ops"
    names = [f"cute_ops.{name}" for name in (*core.split(), "version")]
    names += [f"cute_ops_jax.{name}" for name in ("_compat", "distributed", "primitive")]
    found = run_blocked(program)
    assert found.stdout.strip() == f"{sorted(['fractions', 'jax.ad_checkpoint', *names])} True", found.stderr


MISMATCHES = {
    "bridge": (
        "found = toolchain.version\ntoolchain.version = lambda name: None if name == 'jax-tvm-ffi' else found(name)",
        "jax-tvm-ffi is not installed: pip install 'cute-ops[jax]'",
    ),
    "jax": (
        "import jax; jax.__version_info__, jax.__version__ = (0, 8, 1), '0.8.1'",
        "jax 0.8.1 is too old for jax-tvm-ffi: pip install 'jax>=0.9.1'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_cuda_lowering_says_what_to_install_and_cpus_need_nothing(name: str) -> None:
    mismatch, sentence = MISMATCHES[name]
    code = f"""
from cute_ops.jit import toolchain
{mismatch}
import jax, cute_ops_jax
os.environ["CUTE_OPS_ARCH"] = "sm_90a"
x = jax.numpy.ones((2, 6))
try:
    jax.jit(cute_ops_jax.rmsnorm).trace(x).lower(lowering_platforms=("cuda",))
except RuntimeError as error:
    print(error)
print(cute_ops_jax.rmsnorm(x).shape)
"""
    result = run_blocked(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"cute_ops_jax: kernels cannot run: {sentence}", "(2, 6)"]


def test_private_jax_only_in_compat() -> None:
    private = ("jax._src", "jax.interpreters", "jax.extend", "jaxlib", "jax.core")
    for path in sorted((ROOT / "cute_ops_jax").rglob("*.py")):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.startswith(private)}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(private):
                found.add(node.module or "")
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(private):
                found.add(ast.unparse(node))
        assert bool(found) == (path.name == "_compat.py"), f"{path.name}: {found}"
