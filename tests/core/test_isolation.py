"""The core binds and plans where neither framework, nor the compiler, nor TVM-FFI can be imported.

The check runs in a fresh interpreter and blocks the imports, rather than looking at what happens to be
loaded; a meta-test shows that it can fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_ops import env
from cute_ops.declaration.program import Framework
from cute_ops.ops import OPS

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
"""
USE_CORE = """
import pkgutil, importlib, cute_ops
NEED_NUMPY = ("testing", "compare", "verify", "gradient", "sweep", "sweep_run", "__main__",
             "contract", "interpret", "interpreter", "kernel_calls", "races")
for module in pkgutil.walk_packages(cute_ops.__path__, "cute_ops."):
    if not module.name.startswith("cute_ops.kernels.") and module.name.rpartition(".")[2] not in NEED_NUMPY:
        importlib.import_module(module.name)
from cute_ops import Array
from cute_ops.declaration.binding import bind
from cute_ops import env
from cute_ops.ops import OPS
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
for op in OPS:
    shapes = {name: Array(t.of(op.example((4,), 64)), op.dtype_near(t, "bfloat16")) for name, t in op.inputs.items()}
    print(plan(bind(op, shapes), {}, parse("sm_90a")).variant.symbol)
"""


def run_blocked(code: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK.format(blocked=blocked) + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_core_needs_no_framework_and_no_compiler() -> None:
    result = run_blocked(USE_CORE, ("torch", "jax", "jaxlib", "cutlass", "tvm_ffi", "numpy"))
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == len(OPS)


@pytest.mark.parametrize("blocked", ["cute_ops.declaration.binding", "json"])
def test_the_check_can_fail(blocked: str) -> None:
    result = run_blocked(f"import sys; sys.modules[{blocked!r}] = None" + USE_CORE, ("torch",))
    assert result.returncode != 0 and "ModuleNotFoundError" in result.stderr


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize(
    "path", sorted((ROOT / "cute_ops" / "kernels").rglob("*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_kernels_import_only_cutlass_and_siblings(path: Path) -> None:
    """Of the standard library, too, only what has nothing to do with the machine that compiles."""
    allowed = (
        "cutlass", "cute_ops.kernels", "cute_ops.hardware", "cute_ops.declaration.config",
        "cute_ops.declaration.shapes", "cute_ops.expressions.graph", "cute_ops.expressions.groups",
        "cute_ops.expressions.limits", "cute_ops.expressions.philox", "cute_ops.expressions.reads",
        "cute_ops.expressions.stages", "cute_ops.expressions.text",
        "__future__", "typing", "math", "enum", "dataclasses", "functools", "operator", "collections",
    )  # fmt: skip
    foreign = {name for name in imports_of(path) if not name.startswith(allowed)}
    assert not foreign


def test_every_variable_is_declared_in_one_place() -> None:
    files = ROOT.glob("cute_ops*/**/*.py")
    named = {word for path in files for word in re.findall(r"CUTE_OPS_\w+", path.read_text())}
    assert named == {variable.name for variable in env.VARIABLES}


@pytest.mark.slow
def test_frameworks_offer_what_programs_may_use() -> None:
    """A program that used more would run in one framework alone. mypy compares the arguments."""
    members = {name for name in vars(Framework) if not name.startswith("_")}
    for path in ("cute_ops_torch/library/framework.py", "cute_ops_jax/primitive/framework.py"):
        body = ast.parse((ROOT / path).read_text()).body
        names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        names |= {node.targets[0].id for node in body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
        assert {name for name in names if name[0].islower()} == members, path
    assert {name for path in ROOT.glob("cute_ops/**/*.py") for name in used_by_programs(path)} <= members


def used_by_programs(path: Path) -> set[str]:
    """The names of ``xp`` that functions of ``(xp, call, ...)`` use."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    programs = [f for f in functions if [a.arg for a in f.args.args if a.arg != "self"][:2] == ["xp", "call"]]
    used = [node for program in programs for node in ast.walk(program) if isinstance(node, ast.Attribute)]
    return {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "xp"}
