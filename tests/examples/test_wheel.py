"""The wheel alone, outside of the checkout, runs the README's first example and builds a bundle."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="the extra dev installs it")

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "cute_ops", "cute_ops_torch", "cute_ops_jax")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build writes into its sources, by the tools that are installed: no network."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    run(copy, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".")
    (found,) = (copy / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's packages and nothing else; their dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("site")
    run(folder, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(folder), str(wheel))
    return folder


def run(where: Path, *arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=where, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_what_is_not_python_is_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    data = {p.relative_to(ROOT).as_posix() for pattern in ("py.typed", "*.pyi", "*.json") for p in
            ROOT.glob(f"cute_ops*/**/{pattern}")}  # fmt: skip
    assert len(data) >= 6
    assert data <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(SOURCES[3:])


def test_the_readmes_first_example_runs(site: Path, tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "example.py").write_text(f"{example}\nprint(cute_ops_torch.__file__)\n")
    assert run(tmp_path, "example.py", PYTHONPATH=str(site)).strip() == str(site / "cute_ops_torch/__init__.py")


def test_a_bundle_is_built_and_has_our_license(site: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.txt").write_text("silu x:bfloat16[*,64]\n")
    settings = {"PYTHONPATH": str(site), "CUTE_OPS_CACHE_DIR": str(tmp_path / "cache")}
    run(tmp_path, "-m", "cute_ops", "build", "manifest.txt", "-o", "bundle", "--arch", "sm_90a", **settings)
    texts = [path.read_bytes() for path in (tmp_path / "bundle/licenses").iterdir()]
    assert (ROOT / "LICENSE").read_bytes() in texts
