"""What the README shows works, and what it links to is there."""

from __future__ import annotations

import functools
import re
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES += ["SECURITY.md", "CHANGELOG.md", "benchmarks/results/README.md"]
# What they show are parts of programs.
FRAGMENTS = ["CONTRIBUTING.md", "docs/bring_a_kernel.md", "docs/debugging.md"]
FRAGMENTS += [f"docs/{page}.md" for page in ("kernels", "own_kernel", "row_kernel", "tuning")]


def code(page: str, language: str = "python") -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("page", [page for page in PAGES if code(page) and page not in FRAGMENTS])
def test_code_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From top to bottom, in one namespace. Compiled functions are traced whole, and run by torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", mode=None))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    module = types.ModuleType(re.sub(r"\W", "_", page))  # Dynamo asks for the module of a function that it traces
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        for each in code(page):
            exec(compile(each, page, "exec"), vars(module))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", [*FRAGMENTS, *(page for page in PAGES if code(page, "py"))])
def test_fragments_and_code_for_other_libraries_are_python(page: str) -> None:
    for each in code(page, "py" if page not in FRAGMENTS else "python"):
        compile(each, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


@functools.cache
def files() -> list[str]:
    folders = (path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    return [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files())] == []


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES[:2]:
        for target in re.findall(r"^make (\w+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", text, re.MULTILINE), target
