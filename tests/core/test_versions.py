"""Versions are claimed once, in pyproject.toml: pages say the same, and what runs the tests covers them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.transformers_versions import TESTS, VERSIONS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(re.findall(r"^([\w.-]+)==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
PAGES = {"README.md": 1, "docs/install.md": 0, "docs/versions.md": 1}  # 1: also says versions of packages


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def claimed(package: str) -> str:
    """What is asked for of a package, such as ``>=2.11``."""
    every = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    (found,) = {each for each in every if re.match(rf"{package}\b(?!-)", each)}
    return re.sub(rf"^{package}(\[.*?\])?", "", found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_is_claimed(page: str) -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    said = text(page)
    assert re.findall(r"Python (3[.\d]* (?:to|or) [\d.\w]+)", said)[0] == f"{pythons[0]} to {pythons[-1]}"
    if PAGES[page]:
        assert f"PyTorch {claimed('torch')[2:]} or newer" in said
        assert f"JAX {claimed('jax')[2:]} or newer" in said
        assert f"nvidia-cutlass-dsl) {claimed('nvidia-cutlass-dsl')[2:5]}" in said
        oldest, newest = re.findall(r"\d+\.\d+", claimed("transformers"))
        assert f"transformers {oldest} to {newest[:2]}{int(newest[2:]) - 1}" in said


def test_the_newest_versions_are_named_with_what_was_run() -> None:
    """The page has a row for what constraints.txt pins."""
    rows = [line for line in (ROOT / "docs/versions.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    pinned = [PINNED[name] for name in ("torch", "jax", "transformers", "numpy")]
    assert any(all(f" {version} " in row for version in pinned) for row in rows)


def test_what_is_claimed_of_transformers_is_what_is_run() -> None:
    oldest, newest = VERSIONS[0].split("."), VERSIONS[-1].split(".")
    range_ = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{int(newest[1]) + 1}"
    assert claimed("transformers") == range_
    assert PINNED["transformers"] in VERSIONS
    for page in ("docs/patch.md", "docs/install.md"):
        assert f"`transformers{range_}`" in text(page), page
    assert ", ".join(VERSIONS[:-1]) + f" and {VERSIONS[-1]}" in text("docs/patch.md")
    assert all((ROOT / test).is_file() for test in TESTS)
