"""The digest of a kernel's sources follows what the kernel imports, and imports nothing itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cute_ops.jit import source_digest


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
    source_digest.forget()
    return source_digest.digest(kernel)


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
        "from.unrelated import c", "from . unrelated import c", "import mypackage . unrelated",
        "import os\rimport mypackage.unrelated", "import mypackage.unrelated\tas\tu, os", "from .unrelated import*",
        "try: import os\nexcept: import mypackage.unrelated",
        "if 1: pass\nelse:from .unrelated import c", "from \\\n    .unrelated \\\n  import c",
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


@pytest.mark.fault(
    "a table, a generated module or a library that a kernel uses changes, and no import statement names it",
    "if the op's `sources` name it, the kernel is compiled again", "nothing",
)  # fmt: skip
@pytest.mark.parametrize(
    ("declared", "changed"),
    [
        ("data/table.bin", "mypackage/data/table.bin"),
        ("data", "mypackage/data/deep/more.txt"),
        ("mypackage.unrelated", "mypackage/unrelated.py"),
        ("mypackage.unrelated", "mypackage/_only.py"),
        ("library", "site-packages/library/deep.py"),
    ],
)
def test_what_is_declared_changes_the_key(
    package: Path, declared: str, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = package.parent / changed
    for name, text in {
        "mypackage/data/table.bin": "7", "mypackage/data/deep/more.txt": "", "mypackage/_only.py": "",
        "mypackage/unrelated.py": "from . import _only",
        "site-packages/library/__init__.py": "from library.deep import x", "site-packages/library/deep.py": "",
    }.items():  # fmt: skip
        (package.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (package.parent / name).write_text(text)
    monkeypatch.syspath_prepend(str(package.parent / "site-packages"))
    kernel = "mypackage.kernel:K"
    keys = [key(kernel), key(kernel, (declared,))]
    path.write_text("# changed")
    assert key(kernel) == keys[0] and key(kernel, (declared,)) not in keys


def test_a_declared_source_that_is_nowhere_is_named(package: Path) -> None:
    with pytest.raises(ImportError, match=r"'data/none.bin', which is declared as a source of 'mypackage.kernel', is "):
        key("mypackage.kernel:K", ("data/none.bin",))


def test_a_declared_source_that_cannot_be_read_is_named(package: Path) -> None:
    (package / "data").mkdir()
    (package / "data" / "gone").symlink_to(package / "nowhere")
    with pytest.raises(ImportError, match=r"a declared source of 'mypackage.kernel' cannot be read: .*data/gone"):
        key("mypackage.kernel:K", ("data",))


def test_a_byte_order_mark_hides_no_import(package: Path) -> None:
    (package / "kernel.py").write_text("from . import unrelated\n", encoding="utf-8-sig")
    before = digest()
    (package / "unrelated.py").write_text("c = 2\n")
    assert digest() != before


def test_a_package_goes_before_a_module_of_its_name(package: Path) -> None:
    (package / "_two").mkdir()
    (package / "_two" / "__init__.py").write_text("f = 1\n")
    before = digest()
    (package / "_two.py").write_text("f = 3\n")
    assert digest() == before
    (package / "_two" / "__init__.py").write_text("f = 2\n")
    assert digest() != before


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ImportError, match=r"kernel module 'nowhere.kernel' of 'nowhere.kernel:K' cannot be found"):
        digest("nowhere.kernel:K")


# Six layouts of packages: the kernel, its files, and those that no import statement at the top of a module names.
LAYOUTS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "a file beside the script": (
        "lone:K",
        {
            "lone.py": "import lone_near, lone_beside.maths as maths\ndef f():\n    from lone_late import y\n",
            "lone_near.py": "from lone_star import *\n",
            "lone_star.py": "",
            "lone_beside/__init__.py": "",
            "lone_beside/maths.py": "from.roots import root\nfrom . import powers\n",
            "lone_beside/roots.py": "root = 2",
            "lone_beside/powers.py": "",
            "lone_late.py": "y = 1",
            "- lone_other.py": "",
        },
        ("lone_late.py",),
    ),
    "kernels in a package's __init__": (
        "inits:K",
        {
            "inits/__init__.py": "from inits._part import part\nimport inits.deep.er as er\n",
            "inits/_part.py": "part = 1\nfrom . import _more as m\n",
            "inits/_more.py": "",
            "inits/deep/__init__.py": "",
            "inits/deep/er.py": "from .. import _up",
            "inits/_up.py": "",
            "- inits/_other.py": "",
        },
        (),
    ),
    "a package's __init__ imports them": (
        "again.kernels:K",
        {
            "again/__init__.py": "from .config import TILE\n",
            "again/config.py": "TILE = 4\n",
            "again/kernels/__init__.py": "from .softcap import K\n",
            "again/kernels/softcap.py": "from ..helpers import y\nK = 1\n",
            "again/helpers/__init__.py": "__all__ = ['y', 'listed']\nfrom .where import *\n",
            "again/helpers/where.py": "y = 1\n",
            "- again/kernels/other.py": "",
            "- again/helpers/listed.py": "",
        },
        (),
    ),
    "nested packages": (
        "nested.a.b.kernel:K",
        {
            "nested/__init__.py": "",
            "nested/a/__init__.py": "",
            "nested/a/b/__init__.py": "",
            "nested/a/b/kernel.py": "from ...c import one, \\\n    two\nfrom ...d.e import (  # (why)\n f,\n)\n",
            "nested/c/__init__.py": "two = 2\n",
            "nested/c/one.py": "from ..all_of_it import *\n",
            "nested/all_of_it/__init__.py": "__all__ = ('starred',)\n",
            "nested/all_of_it/starred.py": "",
            "nested/d/__init__.py": "if True: import nested.late\n",
            "nested/late.py": "",
            "nested/d/e.py": "f = 1\n",
            "- nested/c/three.py": "",
        },
        (),
    ),
    "a namespace package": (
        "space.part.kernel:K",
        {
            "space/part/kernel.py": "import space.other.maths, other_space.far\nfrom ..third import deep\n",
            "space/other/maths.py": "try:\n    from . import tables\nexcept ImportError: pass\n",
            "space/other/tables.py": "",
            "space/third/deep.py": "",
            "elsewhere/space/fourth/beyond.py": "",
            "elsewhere/other_space/far.py": "from space.fourth import beyond\n",
            "- space/fifth.py": "",
        },
        (),
    ),
    "a package that was installed, with one of helpers beside it": (
        "shipped.kernel:K",
        {
            "site-packages/shipped/__init__.py": "",
            "site-packages/shipped/kernel.py": "from shipped.deep import a\nimport aided.maths\n",
            "site-packages/shipped/deep.py": "from .deeper import a\n",
            "site-packages/shipped/deeper.py": "a = 1\n",
            "site-packages/aided/__init__.py": "",
            "site-packages/aided/maths.py": "",
            "- site-packages/aided/other.py": "",
        },
        (),
    ),
}
IMPORTS = """
import importlib, json, sys
before = set(sys.modules)
for kernel in sys.argv[1:]:
    importlib.import_module(kernel.partition(":")[0])
new = [module for name, module in list(sys.modules.items()) if name not in before]
print(json.dumps([module.__file__ for module in new if getattr(module, "__file__", None)]))
"""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], set[Path]]:
    """Where they are, what of it is to be importable, and the files that importing every kernel runs."""
    root = tmp_path_factory.mktemp("layouts").resolve()
    for _, files, _ in LAYOUTS.values():
        for name, text in files.items():
            path = root / name.removeprefix("- ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    search = [str(root), str(root / "elsewhere"), str(root / "site-packages")]
    kernels = [kernel for kernel, _, _ in LAYOUTS.values()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *kernels], capture_output=True, text=True, env=environment, check=True
    )
    return root, search, {Path(file) for file in json.loads(done.stdout) if file.startswith(str(root))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_that_a_users_kernel_reaches_changes_its_key(
    layout: str, layouts: tuple[Path, list[str], set[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, search, imported = layouts
    kernel, files, late = LAYOUTS[layout]
    monkeypatch.setattr(sys, "path", [*search, *sys.path])
    reached = {name: root / name for name in files if not name.startswith("- ")}
    written = {root / name.removeprefix("- ") for name in files}
    assert {path for name, path in reached.items() if name not in late} == imported & written
    before = key(kernel)
    assert key(kernel) == before
    for path in reached.values():
        text = path.read_text()
        path.write_text(f"{text}\n# changed")
        assert key(kernel) != before, f"{path} is in no key"
        path.write_text(text)
        assert key(kernel) == before
    for name in files.keys() - reached.keys():
        path = root / name.removeprefix("- ")
        path.write_text(f"# {name}")
        assert key(kernel) == before, f"{path} is in the key of a kernel that does not import it"


OURS = """
import importlib, json, sys
from pathlib import Path
from cute_ops.jit import source_digest
from cute_ops.ops import OPS, PARTS

kernels = {op.kernel.partition(":")[0]: op.kernel for f in (*OPS, *PARTS) for op in (f, f.grad) if op}
root = Path(source_digest.__file__).parents[1]
assert root.parent == Path(sys.argv[1]), f"{root} is no copy"
missed, reached = [], 0
for module, kernel in kernels.items():
    for name in [name for name in sys.modules if name.startswith("cute_ops.kernels")]:
        del sys.modules[name]
    importlib.import_module(module)
    # A process that compiles has imported no more of this package than the driver: a test of the worker shows it.
    ran = {n for n in sys.modules if n.startswith("cute_ops.kernels")}
    ran |= set() if reached else set(source_digest.DRIVER)
    source_digest.forget()
    before, own = source_digest.key(kernel), source_digest.digest(kernel)
    for name in ran:
        path = root.joinpath(*name.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = path.read_text()
        path.write_text(text + "\\n# changed")
        source_digest.forget()
        reached += 1
        same = source_digest.digest(kernel) == own
        if source_digest.key(kernel) == before or same != (name in source_digest.DRIVER):
            missed.append((kernel, name))
        path.write_text(text)
print(json.dumps([missed, reached, len(kernels)]))
"""


@pytest.mark.slow
def test_every_file_that_our_kernels_reach_changes_their_key(tmp_path: Path) -> None:
    """Of a copy of this package, in a process that really imports the kernels."""
    copy = shutil.copytree(
        Path(source_digest.__file__).parents[1], tmp_path / "cute_ops", ignore=lambda *_: {"__pycache__"}
    )
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    # From outside the checkout, whose package the program would find, and edit, first.
    done = subprocess.run(
        [sys.executable, "-c", OURS, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    missed, reached, kernels = json.loads(done.stdout)
    assert missed == [] and kernels > 12 and reached > 8 * kernels


@pytest.mark.fault(
    "kernels were compiled with a setting of the compiler (`CUTE_DSL_ENABLE_ASSERTIONS=1`)",
    "they have other names, so they are not found without the setting", "nothing",
)  # fmt: skip
def test_the_compilers_settings_are_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key("cute_ops.kernels.norm.rmsnorm:RMSNorm")
    for name, value, counts in (
        ("ENABLE_ASSERTIONS", "1", True), ("LINEINFO", "1", True), ("COMPILER_OPT", "iket", True),
        ("LOG_LEVEL", "10", False), ("ARCH", "sm_100a", False), ("DUMP_DIR", "/tmp", False),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(f"CUTE_DSL_{name}", value)
            assert (key("cute_ops.kernels.norm.rmsnorm:RMSNorm") != before) == counts, name
    source_digest.forget()


def test_the_version_is_in_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key("cute_ops.kernels.norm.rmsnorm:RMSNorm")
    with monkeypatch.context() as patch:
        patch.setattr("cute_ops.jit.source_digest.__version__", "99.0")
        assert key("cute_ops.kernels.norm.rmsnorm:RMSNorm") != before
    assert key("cute_ops.kernels.norm.rmsnorm:RMSNorm") == before


def key(kernel: str, declared: tuple[str, ...] = ()) -> str:
    source_digest.forget()
    return source_digest.key(kernel, declared)
