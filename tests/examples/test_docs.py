"""What is made from the declarations is up to date."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import cute_ops
import cute_ops_jax
import cute_ops_torch
import cute_ops_torch.inductor
from cute_ops.composite.models import MODELS
from cute_ops.declaration.headers import header
from cute_ops.ops import ATTENTION, OPS, PRODUCTS
from cute_ops_jax import equinox, nnx
from cute_ops_torch import optim

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import make_ops
import make_pages

ROOT = make_pages.ROOT


@pytest.mark.parametrize("page", make_pages.MADE)
def test_pages_are_made_anew(page: str) -> None:
    assert (make_pages.PAGES / page).read_text(encoding="utf-8") == make_pages.MADE[page](), (
        "run python docs/make_pages.py"
    )


def test_every_variable_that_is_read_is_named() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("cute_ops*/**/*.py"))
    reads = r'environ(?:\.\w+\(|\[)\s*"(\w+)"|getenv\(\s*"(\w+)"|"(CUTE_(?:OPS|DSL)_[A-Z_]*)"'
    found = {name for names in re.findall(reads, code) for name in names if name}
    assert len(found) >= 12
    assert [name for name in found if f"| `{name}" not in make_pages.environment()] == []


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("core", cute_ops), ("torch", cute_ops_torch), ("torch", cute_ops_torch.nn), ("torch", cute_ops_torch.inductor),
        ("jax", cute_ops_jax),
    ],
)  # fmt: skip
def test_every_public_name_is_in_the_reference(page: str, module: ModuleType) -> None:
    """With its docstring; of `nn`, classes that are made of declarations with their signature."""
    text = (make_pages.PAGES / "reference" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^(?:::: \S+\.|- `)(\w+)", text, re.MULTILINE)
    assert {*module.__all__} - {"nn"} <= {*found}


@pytest.mark.parametrize(("page", "module"), [("torch", optim), ("jax", nnx), ("jax", equinox)])
def test_every_class_of_a_module_without_a_list_is_in_the_reference(page: str, module: ModuleType) -> None:
    text = (make_pages.PAGES / "reference" / f"{page}.md").read_text(encoding="utf-8")
    public = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
    assert public and [n for n in public if n[0] != "_" and f"::: {module.__name__}.{n}\n" not in text] == []


def test_the_tour_names_ten_files_and_what_is_in_them() -> None:
    """Each name that a section of the page calls code stands in one of the files that the section links to."""
    page = make_pages.PAGES / "read_the_code.md"
    tour, _, _ = page.read_text(encoding="utf-8").partition("## Then,")
    sections = re.findall(r"^## (\d+)\. [^`]+: `(\S+)`\n(.+?)(?=^## |\Z)", tour, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _, _ in sections] == [*range(1, 11)]
    for _, file, text in sections:
        linked = [page.parent / link for link in re.findall(r"\]\((\.\./[^)#]+)\)", text)]
        assert (ROOT / file).resolve() == linked[0].resolve()
        files = [each for path in linked for each in (path.rglob("*.py") if path.is_dir() else [path])]
        code = "\n".join(path.read_text(encoding="utf-8") for path in files)
        names = [name.rpartition(".")[2] for name in re.findall(r"`([A-Za-z_][\w.]*)`", text)]
        assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.slow
def test_ops_are_documented() -> None:
    assert make_ops.PAGE.read_text(encoding="utf-8") == make_ops.page(), "run python docs/make_ops.py"
    assert make_ops.README.read_text(encoding="utf-8") == make_ops.readme(), "run python docs/make_ops.py"


def test_docstrings_of_ops_name_every_argument() -> None:
    lacking = {
        f"{op.name}: {name}" for op in (*OPS, *PRODUCTS, *ATTENTION, *MODELS) for name in header(op, "", "").parameters
        if not re.search(rf"\b{name}\b", op.doc.partition("Args:")[2])
    }  # fmt: skip
    assert lacking == set()


@pytest.mark.parametrize(("page", "contract"), [("design", "core"), ("pytorch", "torch"), ("jax", "jax")])
def test_rooms_are_described_in_the_order_that_imports_have(page: str, contract: str) -> None:
    text = (make_pages.PAGES / f"{page}.md").read_text(encoding="utf-8")
    table = text.partition("| rooms, from the top |")[2].partition("\n\n")[0]
    shown = [sorted(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines()[2:]]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (each["layers"] for each in contracts if each["id"] == contract)
    assert [line for line in shown if "cute_ops_jax" not in line] == [sorted(line.split(" | ")) for line in layers]
