"""The modules that are made of a notebook's cells; ``test_worker`` compiles from them."""

from __future__ import annotations

import importlib
import linecache
import sys
from typing import Any

import pytest

from cute_ops import Op, Tensor
from cute_ops.declaration import notebook


@pytest.fixture(autouse=True)
def no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of sources without those of other tests, which these need afterwards."""
    monkeypatch.setattr(linecache, "cache", {})


def run(*cells: str) -> dict[str, Any]:
    """The namespace of a notebook after these cells: their source is known to linecache alone."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for text in cells:
        name = f"<cell {len(linecache.cache)}>"
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        exec(compile(text, name, "exec"), namespace)
    return namespace


def module_with(namespace: dict[str, Any], name: str = "Kernel") -> Any:
    module = notebook.module_of(name, namespace)
    assert module is not None
    return importlib.import_module(module)


USER = "class Kernel:\n    def call(self):\n        return thing"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("thing = 3", 3),
        ("thing = -float('inf')", -float("inf")),
        ("thing = (1, 'two', None)", (1, "two", None)),
        ("import os.path as thing", sys.modules["os.path"]),
        ("from os.path import join as thing", sys.modules["os.path"].join),
        ("from __future__ import annotations\nclass A:\n    x: Unknown\nthing = A.__name__", "A"),
    ],
)
def test_what_a_cell_may_refer_to(cell: str, expected: object) -> None:
    assert module_with(run(cell, USER)).Kernel().call() == expected


def test_definitions_of_several_cells() -> None:
    namespace = run(
        "import functools\nLIMIT = 2",
        "def again(f):\n    return functools.wraps(f)(lambda *args: f(*args) * LIMIT)",
        "@again\ndef one(x):\n    return two(x) if x < LIMIT else x\n\ndef two(x):\n    return one(x + 1)",
        "class Base:\n    factor = LIMIT",
        "class Kernel(Base):\n    def call(self, x):\n        again = x\n        return one(again) * self.factor",
    )
    assert module_with(namespace).Kernel().call(1) == namespace["Kernel"]().call(1) == 16


def test_a_cell_that_is_run_again_makes_another_module() -> None:
    cells = "def thing():\n    return 1", USER.replace("thing", "thing()"), "def thing():\n    return 2"
    first, same, changed = (run(*cells[:n]) for n in (2, 2, 3))
    assert module_with(first) is module_with(same)
    assert [module_with(each).Kernel().call() for each in (first, changed)] == [1, 2]


def test_what_no_module_can_hold() -> None:
    with pytest.raises(ValueError, match=r"^'Kernel' of this notebook uses 'thing', a list that cannot be written"):
        notebook.module_of("Kernel", run("thing = [1]", USER))


def test_a_program_whose_source_is_not_known() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Kernel: pass", namespace)
    assert notebook.module_of("Kernel", namespace) is None


def test_an_op_says_which_class_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = sys.modules["__main__"]
    monkeypatch.setattr(program, "__spec__", None)
    monkeypatch.delattr(program, "__file__", raising=False)
    rows = Tensor("*m n", "float32")
    with pytest.raises(ValueError, match=r"^op fill: the kernel's class 'Nowhere' is not defined: define it before"):
        Op(
            "fill",
            inputs={"x": rows},
            outputs={"y": rows},
            dtypes={},
            reference=lambda xp, x: x,
            kernel="__main__:Nowhere",
        )
