"""The keys that Inductor's caches get for our modules and for references."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cute_ops
from cute_ops import FLOATS, Op, Tensor
from cute_ops.jit import source_digest
from cute_ops.ops import OPS
from cute_ops_torch.inductor import cache_key


def op_of(reference: Callable[..., Any]) -> Op:
    rows = Tensor("*m n", "T")
    return Op(
        "own", inputs={"x": rows}, outputs={"out": rows}, dtypes={"T": FLOATS}, reference=reference, kernel="nowhere:K"
    )


def key(reference: Callable[..., Any]) -> str:
    return cache_key.of_op(op_of(reference))


def test_every_module_of_this_package_changes_the_key(tmp_path: Path) -> None:
    """Those that the former key knew nothing of, for two: _choice, which decides, and launch, which generated code
    calls.
    """
    folders = [Path(cute_ops.__file__).parent, Path(cache_key.__file__).parent]
    copies = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    before = cache_key.of_folders("1", *folders)
    assert cache_key.of_folders("1", *copies) == before != cache_key.of_folders("2", *copies)
    for path in (path for copy in copies for path in copy.rglob("*.py")):
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        assert cache_key.of_folders("1", *copies) != before, path
        path.write_bytes(text)
    assert cache_key.of_folders("1", *copies) == before


def test_our_references_are_part_of_the_package() -> None:
    assert not any(cache_key.of_op(op) for op in OPS)


FACTORY = """
from functools import wraps
import own_numbers
SCALE = 2.0
def reference(xp, x):
    return x * SCALE * own_numbers.FACTOR
def made(*values, **named):
    return lambda xp, x: x * values[0]
def wrapped(function):
    @wraps(function)
    def run(*args):
        return function(*args)
    return run
class Reference:
    def __init__(self, value):
        self.value = value
    def __call__(self, xp, x):
        return x * self.value
    def method(self, xp, x):
        return x * self.value
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_references.py").write_text(FACTORY)
    (tmp_path / "own_numbers.py").write_text("FACTOR = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("own_references")
    del sys.modules["own_references"], sys.modules["own_numbers"]
    source_digest.forget()


def test_what_a_reference_is_made_of_changes_the_key(own: Any, tmp_path: Path) -> None:
    makes: dict[str, Callable[[], Callable[..., Any]]] = {
        "function": lambda: own.reference,
        "closure": lambda: own.made(2.0),
        "partial": lambda: partial(own.made, a=1, b=2),
        "another order": lambda: partial(own.made, a=2, b=1),
        "wrapped": lambda: own.wrapped(own.reference),
        "object": lambda: own.Reference(2),
        "another object": lambda: own.Reference(3),
        "method": lambda: own.Reference(2).method,
        "array": lambda: own.made(np.arange(3.0)),
        "another array": lambda: own.made(np.arange(4.0)),
        "another closure": lambda: own.made(3.0),
        "function in function": lambda: own.made(own.made(2.0)),
    }
    before = {name: key(make()) for name, make in makes.items()}
    assert before == {name: key(make()) for name, make in makes.items()}
    assert len(set(before.values())) == len(makes)
    for edited in ("own_references", "own_numbers"):
        with (tmp_path / f"{edited}.py").open("a") as file:
            file.write("# edited\n")
        source_digest.forget()
        after = {name: key(make()) for name, make in makes.items()}
        assert not set(before.values()) & set(after.values())
        before = after
    own.SCALE = 3.0
    assert key(own.reference) != before["function"]


def test_numbers_of_a_traced_function_change_the_keys_of_its_op_and_of_its_gradient() -> None:
    def keys(factor: float) -> list[str]:
        def scaled(xp: Any, x: Any) -> Any:
            return xp.tanh(x * factor)

        op = cute_ops.fused(scaled, operands={"x": "*m n"})
        product = cute_ops.fused_linear(scaled, operands={})
        return [cache_key.of_op(each) for each in (op, *op.steps, product, product.steps[0])]

    assert keys(2.0) == keys(2.0)
    assert not set(keys(2.0)) & set(keys(3.0))


def test_every_part_of_a_declaration_changes_the_key() -> None:
    """The default of an attribute for one: graphs leave out what equals it."""

    def made(attrs: dict[str, Any], x: Tensor, **given: Any) -> Op:
        return Op(
            "own", inputs={"x": x}, outputs={"out": x}, dtypes={"T": FLOATS}, attrs=attrs, reference=max,
            kernel="nowhere:K", **given,
        )  # fmt: skip

    rows = Tensor("*m n", "T")
    declared = [
        made({"a": 1.0}, rows), made({"a": 2.0}, rows), made({"b": 1.0}, rows), made({"a": 1}, rows), made({}, rows),
        made({"a": 1.0}, Tensor("*m 2n", "T")),
        made({"a": 1.0}, rows, derived={"k": lambda dims, attrs: 1}),
    ]  # fmt: skip
    assert len({cache_key.of_op(op) for op in declared}) == len(declared)


def test_a_reference_that_cannot_be_followed_is_served_to_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, Any] = {}
    exec("def reference(xp, x):\n    return x", space)
    unknown = [space["reference"], lambda xp, x, lock=sys.stdout: x]
    before = list(map(key, unknown))
    monkeypatch.setattr(cache_key, "_NEVER", "another process")
    assert not set(before) & set(map(key, unknown))
