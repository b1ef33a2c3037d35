"""Functions stay small, and docstrings stand alone: limits of CONTRIBUTING.md, counted over the three packages."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = {ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.match_case}
INNER = {ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef}


@cache
def definitions() -> list[tuple[str, FUNCTIONS | ast.ClassDef | ast.Module]]:
    """Modules and the functions and classes in them, each with its file."""
    paths = [path for name in ("cute_ops", "cute_ops_torch", "cute_ops_jax") for path in (ROOT / name).rglob("*.py")]
    return [
        (str(path.relative_to(ROOT)), node)
        for path in sorted(paths)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, FUNCTIONS | ast.ClassDef | ast.Module)
    ]


def functions() -> list[tuple[str, FUNCTIONS]]:
    return [(f"{path}:{node.lineno} {node.name}", node) for path, node in definitions() if isinstance(node, FUNCTIONS)]


def positional(function: FUNCTIONS) -> int:
    """Arguments that may be passed by position, without the object of a method."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def branches(function: FUNCTIONS) -> int:
    """Branches, loops and further operands of ``and`` and ``or``, without those of functions and classes inside."""
    count, waiting = 0, [*ast.iter_child_nodes(function)]
    while waiting:
        node = waiting.pop()
        if type(node) not in INNER:
            count += (type(node) in BRANCHES) + (len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0)
            waiting += ast.iter_child_nodes(node)
    return count


@pytest.mark.slow
def test_few_functions_take_more_than_6_positional_arguments() -> None:
    theirs = "cute_ops_torch/compat/"  # other libraries' signatures
    many = [where for where, function in functions() if positional(function) > 6 and not where.startswith(theirs)]
    assert len(many) <= 26, many


@pytest.mark.slow
def test_few_functions_have_more_than_15_branches() -> None:
    counts = {where: branches(function) for where, function in functions()}
    many = {where: count for where, count in counts.items() if count > 15}
    assert len(many) <= 20, many
    assert max(counts.values()) <= 25, max(counts, key=counts.__getitem__)


@pytest.mark.slow
def test_docstrings_do_not_lean_on_the_one_before() -> None:
    starts = "The same", "As ", "Those ", "Likewise"
    leaning = [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, node in definitions()
        if (ast.get_docstring(node) or "").startswith(starts)
    ]
    assert not leaning


def test_what_is_counted() -> None:
    text = "def f(self, a, *, b):\n    if a and b:\n        return [x for x in a]\n    return lambda x: 1 if x else 2"
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert (positional(function), branches(function)) == (1, 3)
