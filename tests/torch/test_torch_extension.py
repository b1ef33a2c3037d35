"""The C++ extension: built, refused and turned off; and the suite once more in a process that has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_ops.errors import CacheError, CompileError
from cute_ops.files import cache_dir
from cute_ops_torch import __main__
from cute_ops_torch.host import extension

HERE = Path(__file__).parent
# What goes through the C++ parts on a CPU: autograd.
FILES = ("test_torch_autograd.py", "test_torch_errors.py", "test_torch_ops.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the extension."""
    folder = tmp_path_factory.mktemp("extension") / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "cute_ops_torch", "build-extension"],
        capture_output=True, text=True, env={**os.environ, "CUTE_OPS_CACHE_DIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == folder
    return folder


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "CUTE_OPS_CACHE_DIR": str(folder), **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=given)


def passed(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stdout[-6000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])


def test_launches(built: Path) -> None:
    assert passed(run(built, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "native_launch.py"))) > 300


def test_the_suite_with_the_extension(built: Path) -> None:
    """One op stands for all: the C++ is the same, and its table is tested above for each."""
    files = [str(HERE / name) for name in FILES]
    done = run(built, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, CUTE_OPS_TEST_ONLY="add_rmsnorm")
    assert passed(done) > 100


PROGRAM = """
import sys, torch, cute_ops_torch
x = torch.randn(2, 8, requires_grad=True)
print(type(cute_ops_torch.rmsnorm(x).grad_fn).__name__, "tvm_ffi" in sys.modules, "jax" in sys.modules)
"""
DOCTOR = """
import runpy
runpy.run_module("cute_ops_torch.tools.doctor", run_name="__main__")
"""


def test_used_where_it_is_built_and_not_turned_off(built: Path, tmp_path: Path) -> None:
    """And the doctor tells which it is."""

    def said(folder: Path, **environment: str) -> tuple[list[str], str]:
        first, _, rest = run(folder, "-c", PROGRAM + DOCTOR, **environment).stdout.partition("\n")
        return first.split(), rest

    name = "cute_rmsnormBackward"
    used, doctor = said(built)
    assert used == ["CppFunction", "False", "False"]
    assert re.search(r"ok\tC\+\+ extension: /.*torch_extension_", doctor)
    used, doctor = said(built, CUTE_OPS_TORCH_EXTENSION="0")
    assert used[0] == name
    assert "note\tC++ extension: turned off" in doctor
    used, doctor = said(tmp_path)
    assert used[0] == name
    assert "note\tC++ extension: not built for this torch" in doctor


def test_a_damaged_one_is_left_alone(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(folder))
    for path in built.glob("torch_extension_*"):
        (folder / path.name).write_bytes(path.read_bytes())
    load = extension.loaded.__wrapped__
    assert load() is not None
    folder.chmod(0o777)
    assert load() is None
    assert "can be written by others" in caplog.text
    folder.chmod(0o700)
    with next(folder.glob("*.so")).open("ab") as file:
        file.write(b"x")
    assert load() is None


def test_building_again_compiles_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(built))
    monkeypatch.setattr(extension.subprocess, "run", None)
    assert extension.build().parent == built


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=r"no C\+\+ compiler found \(c\+\+, g\+\+, clang\+\+\)"):
        extension.build()
    assert __main__.main(["build-extension"]) == 1
    assert "no C++ compiler found" in capsys.readouterr().err


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(extension, "SOURCE", tmp_path / "broken.cpp")
    extension.SOURCE.write_text("this is not C++")
    with pytest.raises(CompileError, match="the extension does not compile"):
        extension.build()
    assert not list(tmp_path.glob("cache/*"))


def test_a_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(extension.subprocess, "run", lambda command, **_: _pretend(command))
    with pytest.raises(CacheError, match="can be written by others"):
        extension.build()
    assert cache_dir.folder() == tmp_path
    assert not list(tmp_path.glob("*.so"))


def _pretend(command: list[str]) -> subprocess.CompletedProcess[str]:
    Path(command[command.index("-o") + 1]).write_bytes(b"")
    return subprocess.CompletedProcess(command, 0, "", "")
