"""What the README shows works, and what it links to is there."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import cute_ops_torch
from cute_ops.__main__ import app

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES += ["SECURITY.md", "CHANGELOG.md", "benchmarks/results/README.md"]
# What they show are parts of programs.
FRAGMENTS = ["CONTRIBUTING.md", "docs/bring_a_kernel.md"]
FRAGMENTS += [f"docs/{page}.md" for page in ("kernels", "own_kernel", "row_kernel")]


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
    for page in PAGES:
        shown = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", shown, re.MULTILINE):
            assert re.search(rf"^{target}:", text, re.MULTILINE), target


def commands(page: str) -> Iterator[list[str]]:
    """What the page shows behind ``python -m cute_ops`` or ``cute-ops``, in blocks and in sentences."""
    for i, part in enumerate(re.split(r"^```(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)):
        shown = (
            r"(?:python -m cute_ops|cute-ops) ([^#\n]+)"
            if i % 2
            else r"`[^`]*(?:python -m cute_ops|cute-ops)\s([^`]+)`"
        )
        yield from map(shlex.split, re.findall(shown, part))


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page)) and page != "CHANGELOG.md"])
def test_commands_of_the_pages_are_understood(page: str) -> None:
    """Each command, with its options, is one of the command line, and its files are there. None runs."""
    for words in commands(page):
        command: Any = typer.main.get_command(app)
        context, left = command.make_context("cute-ops", words), words
        while hasattr(command, "commands"):
            name, command, left = command.resolve_command(context, left)
            assert command, words
            if left:  # a name alone is a sentence's
                context = command.make_context(name, left, parent=context)
        assert [w for w in words if w.startswith("examples/") and not (ROOT / w.partition(":")[0]).exists()] == []


GELU_ADD = """import torch

import cute_ops_torch

x, weight = torch.randn(4, 256), torch.randn(512, 256)
bias = torch.randn(512)




def gelu_add(xp, acc):
    return xp.gelu(acc + bias)
"""
CLAMP = """def clamp(xp, x):
    # a comment
    if x > 0:
        return x
    return 0 * x
"""
REFUSED = {
    "docs/products.md": (GELU_ADD, lambda m: cute_ops_torch.linear(m["x"], m["weight"], epilogue=m["gelu_add"])),
    "docs/fused.md": (CLAMP, lambda m: cute_ops_torch.fused(m["clamp"])(torch.ones(4, 8))),
}


@pytest.mark.parametrize("page", REFUSED)
def test_errors_that_are_shown_are_raised(page: str, tmp_path: Path) -> None:
    text, call = REFUSED[page]
    (tmp_path / "model.py").write_text(text, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(text, str(tmp_path / "model.py"), "exec"), names)
    with pytest.raises(Exception, match="cannot be traced") as raised:
        call(names)
    said = f"{raised.typename}: {raised.value}".replace(f"{tmp_path}/", "")
    (shown,) = re.findall(
        r"^```\n(TraceError.*?)\n```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert re.fullmatch(re.escape(shown).replace(re.escape("..."), ".*"), said)
