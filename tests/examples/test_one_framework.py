"""The author's pages and examples where one framework is installed: imports of the other one fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As a site's module, so that every process of a command has it.
BLOCK = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else found(name, path, target)
PathFinder.find_spec = find_spec
"""
OTHERS = {"torch": ("jax", "jaxlib", "jax_tvm_ffi"), "jax": ("torch",)}
PAGES = ("own_kernel", "row_kernel", "bring_a_kernel", "debugging", "kernels")
TORCH = "examples/bring_a_kernel/contract_relu.py"  # a file of functions on its tensors
# The commands of these pages that take an own file and need neither a GPU nor much time.
RUNS = re.compile(r"^python -m cute_ops verify (?:examples/\S+|softcap)\.py(?= |$)", re.MULTILINE)


def run(framework: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BLOCK.format(blocked=OTHERS[framework]))
    path = os.pathsep.join((str(folder), str(ROOT)))
    # Nothing is compiled by Inductor, which takes longer than all the rest: test_custom_op does that.
    environment = {**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    environment["CUTE_OPS_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def commands() -> list[str]:
    """What the pages verify, and every other declaration of the examples."""
    texts = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES]
    found = {word.split()[-1] for text in texts for word in RUNS.findall(text)} - {"softcap.py", TORCH}
    declares = re.compile(r"^from cute_ops import .*\b(Op|fused)\b", re.MULTILINE)
    for path in (ROOT / "examples").glob("*/*.py"):
        if declares.search(path.read_text(encoding="utf-8")):
            found.add(str(path.relative_to(ROOT)))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "program", "said"),
    [
        ("torch", "import cute_ops_jax", "cute_ops_jax needs JAX: pip install 'cute-ops[jax]'"),
        ("jax", "import cute_ops_torch", "cute_ops_torch needs PyTorch: pip install 'cute-ops[torch]'"),
        (
            "torch", "import sys, cute_ops_torch as c; sys.modules['transformers'] = None; c.register_attention()",
            "register_attention needs transformers: pip install 'cute-ops[hf]'",
        ),
    ],
)  # fmt: skip
def test_what_is_not_installed_is_named_with_its_extra(framework: str, program: str, said: str, tmp_path: Path) -> None:
    result = run(framework, tmp_path, "-c", program)
    assert result.returncode == 1 and result.stderr.endswith(f"\nImportError: {said}\n")


WALK = """
import sys
from cute_ops.__main__ import app
for file in sys.argv[1:]:
    try:
        app(["verify", file, "--dtype", "float32"])
    except SystemExit as end:
        assert not end.code, file
"""


@pytest.mark.drawn(0.5, among="one framework")
@pytest.mark.slow
@pytest.mark.parametrize("framework", OTHERS)
def test_every_declaration_is_verified(framework: str, tmp_path: Path) -> None:
    files = [file for file in commands() if "gallery" not in file]
    assert {"examples/custom_op/softcap.py", "examples/row_kernel/unit_norm.py"} < {*files} and len(files) >= 8
    done = run(framework, tmp_path, "-c", WALK, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{framework} on cpu\n") == len(files), done.stdout


@pytest.mark.drawn(0.5, among="one framework")
@pytest.mark.slow
@pytest.mark.parametrize("framework", OTHERS)
def test_the_scripts_run(framework: str, tmp_path: Path) -> None:
    done = run(framework, tmp_path, f"examples/custom_op/run_{framework}.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("framework", OTHERS)
def test_the_interpreter_needs_no_framework(framework: str, tmp_path: Path) -> None:
    file = "examples/bring_a_kernel/row_sum.py"
    done = run(framework, tmp_path, "-m", "cute_ops", "verify", file, "--interpret", "--dim", "n=33")
    assert done.returncode == 0 and "1 of 1 right" in done.stdout, done.stdout + done.stderr


def test_the_check_can_fail(tmp_path: Path) -> None:
    done = run("torch", tmp_path, "examples/custom_op/run_jax.py")
    assert done.returncode == 1 and "No module named 'jax'" in done.stderr
