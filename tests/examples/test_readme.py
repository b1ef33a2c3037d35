"""What the README shows works, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES += ["SECURITY.md", "CHANGELOG.md", "benchmarks/results/README.md"]


@pytest.mark.parametrize("page", ["README.md", "docs/fused.md"])
def test_code_runs(page: str) -> None:
    namespace = {"__name__": page}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(code, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    for page in PAGES[:2]:
        for target in re.findall(r"^make (\w+)", (ROOT / page).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", text, re.MULTILINE), target
