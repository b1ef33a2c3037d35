"""The digest of a kernel's sources follows what the kernel imports, and imports nothing itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cute_ops import sources


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "kernel.py").write_text("from . import (\n    _one,\n)\nfrom mypackage._two import f  # why\nimport os\n")
    (folder / "_one.py").write_text("a = 1\n")
    (folder / "_two.py").write_text("from ._three import b\n")
    (folder / "_three.py").write_text("b = 1\n")
    (folder / "unrelated.py").write_text("c = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def digest(kernel: str = "mypackage.kernel:K") -> str:
    sources.digest.cache_clear()
    return sources.digest(kernel)


@pytest.mark.parametrize("name", ["kernel", "_one", "_two", "_three"])
def test_a_change_in_any_imported_module_counts(package: Path, name: str) -> None:
    before = digest()
    with (package / f"{name}.py").open("a") as file:
        file.write("# changed\n")
    assert digest() != before
    assert "mypackage" not in sys.modules


@pytest.mark.parametrize(
    "statement",
    [
        "from . import unrelated", "from .unrelated import c", "import mypackage.unrelated", "from . import(unrelated)",
        "import mypackage.unrelated as u", "from mypackage.unrelated import *", "import os; from . import unrelated",
        "from . import _one; import os\nimport os, mypackage.unrelated", "if True: from . import unrelated",
        "def f():\n\tfrom .unrelated import c", "from . import (\n    _one,  # like f(x)\n    unrelated,\n)",
        "from . import _one, \\\n    unrelated", "from mypackage \\\n    import unrelated",
        "from mypackage.unrelated \\\n    import \\\n    c", "from . import _one  # (\nfrom . import unrelated",
    ],
)  # fmt: skip
def test_every_way_to_import_is_seen(package: Path, statement: str) -> None:
    (package / "kernel.py").write_text(f"a = 'import'\n{statement}\n")
    compile((package / "kernel.py").read_text(), "kernel.py", "exec")
    before = digest()
    (package / "unrelated.py").write_text("c = 2\n")
    assert digest() != before


def test_an_unrelated_module_does_not_count(package: Path) -> None:
    before = digest()
    (package / "unrelated.py").write_text("c = 2\n")
    assert digest() == before


def test_a_lone_module_and_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lonekernel.py").write_text("import lonehelper\n")
    (tmp_path / "lonehelper.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = digest("lonekernel:K")
    (tmp_path / "lonehelper.py").write_text("a = 2\n")
    assert digest("lonekernel:K") != before


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ImportError, match=r"kernel module 'nowhere.kernel' of 'nowhere.kernel:K' cannot be found"):
        digest("nowhere.kernel:K")
