"""The wheels alone, outside of the checkout: examples run with either framework, and prebuilt kernels are found."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import kernel_wheel
import pytest

pytest.importorskip("build", reason="the extra dev installs it")
from packaging.requirements import Requirement

from cute_ops import __version__
from cute_ops.calls import manifest
from cute_ops.errors import CacheError
from cute_ops.jit.target import parse

ROOT = Path(__file__).parents[2]
PACKAGES = ("cute_ops", "cute_ops_torch", "cute_ops_jax")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", *PACKAGES)
KERNELS = "silu x:bfloat16[*,64]\nrmsnorm x:bfloat16[*,64] weight:bfloat16[64]\n"
# Which frameworks are there, and where kernels come from that a GPU would be given.
LOOK = f"""
import sys
from importlib.util import find_spec
from cute_ops.calls import manifest
from cute_ops.aot import build
from cute_ops.jit import cache, target
for call in manifest.parse({KERNELS!r}):
    cache.get(build.variant_of(call, target.parse("sm_90a")))
print(*[name for name in ("torch", "jax") if find_spec(name)])
print(cache.counters.bundled, "from bundles,", cache.counters.compiled, "compiled")
print(cache.__file__)
"""

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build writes into its sources, by the tools that are installed: no network."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    run(sys.executable, copy, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".")
    (found,) = (copy / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of two prebuilt kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "manifest.txt").write_text(KERNELS)
    settings = {"PYTHONPATH": str(ROOT), "CUTE_OPS_CACHE_DIR": str(folder / "cache")}
    run(sys.executable, folder, str(ROOT / "release/kernel_wheel.py"), "manifest.txt", "--out", "dist", **settings)
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes an environment into which pip has installed both wheels, without a network: what they need is linked from
    the environment of the tests, and nothing else. Returns its Python.
    """

    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for found in needed(wheel, extras):
            for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (site / entry).exists():
                    link(site / entry, Path(str(found.locate_file(entry))).resolve())
        named = f"cute-ops[{','.join(extras)}] @ {wheel.as_uri()}"
        pip = ["-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "--no-compile"]
        run(sys.executable, folder, *pip, "--no-index", named, str(kernels))
        return folder / "bin/python"

    return make


def link(path: Path, package: Path) -> None:
    """Link a package, and its bytecode where that lies apart: compiling torch anew takes five seconds."""
    path.symlink_to(package)
    if sys.pycache_prefix and package.is_dir():
        bytecode, own = (Path(sys.pycache_prefix, *each.parts[1:]) for each in (package, path))
        bytecode.mkdir(parents=True, exist_ok=True)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.symlink_to(bytecode)


def needed(wheel: Path, extras: tuple[str, ...]) -> Iterator[metadata.Distribution]:
    """The installed packages that a wheel with these extras asks for, and those that they ask for."""
    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    todo, seen = [(metadata.PathDistribution(info), extras)], set()
    while todo:
        package, wanted = todo.pop()
        for requirement in map(Requirement, package.requires or ()):
            marker, key = requirement.marker, (requirement.name, *sorted(requirement.extras))
            if key not in seen and (not marker or any(marker.evaluate({"extra": e}) for e in ("", *wanted))):
                seen.add(key)
                todo.append((metadata.distribution(requirement.name), tuple(requirement.extras)))
                yield todo[-1][0]


def run(python: Path | str, where: Path, *arguments: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(python), *arguments], cwd=where, env=environment | settings, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_what_is_not_python_is_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    data = {p.relative_to(ROOT).as_posix() for pattern in ("py.typed", "*.pyi", "*.json") for p in
            ROOT.glob(f"cute_ops*/**/{pattern}")}  # fmt: skip
    assert len(data) >= 6
    assert data <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert wheel.name == f"cute_ops-{__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_a_package_index_shows_no_link_that_leads_nowhere(wheel: Path) -> None:
    """Relative links would be relative to the index: they become those of the repository, or plain text."""
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(name).decode()
    assert "Description-Content-Type: text/markdown" in text and "# cute_ops" in text and "```python" in text
    assert "](docs/" not in text and "](benchmarks/" not in text
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    page = "[`a`](docs/a.md#b) ![c](d/e.svg) [f](#g) [h](https://i.example)\n```\n[j](k)\n```\n"
    here = "https://x.example/y"
    assert described(page, here + "/", "1.2") == (
        f"[`a`]({here}/blob/v1.2/docs/a.md#b) ![c]({here}/raw/v1.2/d/e.svg) [f](#g) [h](https://i.example)\n"
        "```\n[j](k)\n```\n"
    )
    assert described(page, None, "1.2") == "`a`  [f](#g) [h](https://i.example)\n```\n[j](k)\n```\n"


@pytest.mark.slow
def test_a_wheel_of_kernels_asks_for_what_they_were_built_with(kernels: Path) -> None:
    text = zipfile.ZipFile(kernels).read(f"cute_ops_kernels_sm90-{__version__}.dist-info/METADATA").decode()
    pinned = dict(re.findall(r"^Requires-Dist: (\S+)==(\S+)$", text, re.MULTILINE))
    names = ("cute-ops", "nvidia-cutlass-dsl", "apache-tvm-ffi")
    assert pinned == {name: __version__ if name == "cute-ops" else metadata.version(name) for name in names}
    assert kernels.name.startswith(f"cute_ops_kernels_sm90-{__version__}-py3-none-manylinux")


@pytest.mark.slow
def test_a_wheel_of_kernels_is_compared_with_the_sources(kernels: Path, tmp_path: Path) -> None:
    """The release's check: all kernels of these sources, each as it was built."""
    calls, where = manifest.parse(KERNELS), parse("sm_90a")
    assert kernel_wheel.check(kernels, calls, where) == 2
    more = manifest.parse("silu x:bfloat16[*,64]\nsilu x:float16[*,64]\n")
    with pytest.raises(ValueError, match=r"lacks 1 kernels, such as silu.*float16.*: build it again"):
        kernel_wheel.check(kernels, more, where)
    damaged = tmp_path / kernels.name
    with zipfile.ZipFile(kernels) as whole, zipfile.ZipFile(damaged, "w") as other:
        for name in whole.namelist():
            other.writestr(name, whole.read(name)[: -1 if name.endswith(".so") else None])
    with pytest.raises(CacheError, match="checksum"):
        kernel_wheel.check(damaged, calls, where)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("frameworks", [("torch",), ("jax",), ("torch", "jax")], ids="+".join)
def test_examples_run_in_an_empty_environment(frameworks: tuple[str, ...], environment: Make, tmp_path: Path) -> None:
    python, cache = environment(*frameworks), str(tmp_path / "cache")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    named = {
        e: set(re.findall(r"^import cute_ops_(\w+)", e, re.MULTILINE)) for e in examples if "transformers" not in e
    }
    chosen = [example for example, names in named.items() if names <= set(frameworks)]
    assert set().union(*(named[example] for example in chosen)) == set(frameworks)
    said = run(python, tmp_path, "-c", "\n".join([LOOK, *chosen]), CUTE_OPS_CACHE_DIR=cache)
    there, counted, where, *_ = said.splitlines()
    assert there == " ".join(frameworks)
    assert counted == "2 from bundles, 0 compiled"
    assert Path(where).is_relative_to(python.parents[1])
    command = python.with_name("cute-ops")
    assert run(command, tmp_path, "--version", CUTE_OPS_CACHE_DIR=cache) == f"cute_ops {__version__}\n"
    if frameworks == ("jax",):
        wrong = subprocess.run(
            [command, "doctor"], env={"CUTE_OPS_CACHE_MAX_BYTES": "much"}, capture_output=True, text=True
        )
        assert (
            wrong.returncode == 1
            and wrong.stderr.count("\n") == 1
            and "CUTE_OPS_CACHE_MAX_BYTES is 'much'" in wrong.stderr
        )
        said = run(python, tmp_path, "-m", "cute_ops", "doctor", CUTE_OPS_CACHE_DIR=cache, COLUMNS="300")
        assert f"package cute-ops-kernels-sm90 {__version__}: 2 kernels for sm_90a:132, sound" in said
        assert "note torch is not installed" in said
        (tmp_path / "manifest.txt").write_text("silu x:bfloat16[*,64]\n")
        build = ("-m", "cute_ops", "build", "manifest.txt", "-o", "bundle", "--arch", "sm_90a")
        run(python, tmp_path, *build, CUTE_OPS_CACHE_DIR=cache)
        texts = [path.read_bytes() for path in (tmp_path / "bundle/licenses").iterdir()]
        assert (ROOT / "LICENSE").read_bytes() in texts
