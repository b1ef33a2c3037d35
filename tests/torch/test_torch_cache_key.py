"""The keys that Inductor's caches get for our modules and for references."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
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


@pytest.mark.slow
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


# What a traced function may read, by name: the text of its module, and of what an edit puts in place of `2.0`.
EVERYTHING = """
import json
import os
from functools import partial
from pathlib import Path

import constants_of_{n}
from constants_of_{n} import IMPORTED

FACTOR = {global_}
TABLE = {{"k": {dict_}}}
CONFIG = json.loads((Path(__file__).parent / "config_{n}.json").read_text())
VARIABLE = float(os.environ["FACTOR_{n}"])

def closed(k):
    return lambda x: x * k

by_closure = closed({closure})

def by_default(x, k={default}):
    return x * k

by_partial = partial(by_default, k={partial})

class Scaled:
    def __init__(self):
        self.k = {attribute}
    def method(self, x):
        return x * self.k

by_method = Scaled().method

def everything(xp, x):
    x = by_method(by_partial(by_default(by_closure(x)))) * FACTOR * TABLE["k"] * CONFIG["k"] * VARIABLE * IMPORTED
    late = json.loads((Path(__file__).parent / "config_{n}.json").read_text())["late"]
    return xp.tanh(x * late * float(os.environ["FACTOR_READ_{n}"]) * constants_of_{n}.LATE / 2.0**12)
"""
THINGS = (
    "global_", "dict_", "closure", "default", "partial", "attribute", "imported", "late", "file", "file_late",
    "variable", "variable_late",
)  # fmt: skip


def write_everything(folder: Path, n: str, edited: str = "") -> dict[str, str]:
    """A module that reads all of it, where one thing is 3.0 in place of 2.0; returns the environment."""
    value = {thing: 3.0 if thing == edited else 2.0 for thing in THINGS}
    (folder / f"everything_{n}.py").write_text(EVERYTHING.format(n=n, **value))
    (folder / f"constants_of_{n}.py").write_text(f"IMPORTED = {value['imported']}\nLATE = {value['late']}\n")
    (folder / f"config_{n}.json").write_text(json.dumps({"k": value["file"], "late": value["file_late"]}))
    return {f"FACTOR_{n}": str(value["variable"]), f"FACTOR_READ_{n}": str(value["variable_late"])}


def test_each_thing_that_a_function_reads_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    x, keys = np.full((1, 2), 0.5, np.float32), {}
    for edited in ("", "again", *THINGS):
        for name, value in write_everything(tmp_path, "here", edited).items():
            monkeypatch.setenv(name, value)
        source_digest.forget()
        importlib.invalidate_caches()
        for name in ("everything_here", "constants_of_here"):
            sys.modules.pop(name, None)
        op = cute_ops.fused(importlib.import_module("everything_here").everything, operands={"x": "*m n"})
        keys[edited] = cache_key.of_op(op)
        (out,) = op.reference(np, x)
        assert out == pytest.approx(np.tanh(0.5 if edited in ("", "again") else 0.75), rel=1e-5), edited
    assert keys[""] == keys["again"]
    assert keys[""] not in [keys[thing] for thing in THINGS]


WARM = """
import os, pathlib, sys, torch, torch._inductor.compile_fx
import cute_ops, cute_ops_torch
from torch._dynamo.utils import counters
from cute_ops_torch.inductor import fusion_choice

sys.dont_write_bytecode = True
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from tests.torch.test_torch_cache_key import write_everything

for edited in sys.argv[3:]:
    environment = write_everything(pathlib.Path(sys.argv[2]), "warm", edited)
    if not (child := os.fork()):
        os.environ.update(environment)
        from everything_warm import everything

        op = cute_ops_torch.register(cute_ops.fused(everything, operands={"x": "*m n"}), "warm")
        fusion_choice.DEVICES, fusion_choice.fused_wins = {"cpu"}, lambda ours, theirs: True
        with torch._inductor.config.patch(max_autotune_pointwise=True):
            out = torch.compile(lambda x: op(x) + 1, fullgraph=True)(torch.full((2, 64), 0.5))
        print(edited, counters["inductor"]["fxgraph_cache_hit"], round(float(out[0, 0]) - 1, 4), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{edited} failed")
"""


@pytest.mark.drawn(0.35, among="second processes")
@pytest.mark.slow
def test_a_warm_cache_gives_no_old_value(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Fresh processes, in which Inductor writes the op out, find what the first one has compiled, unless one of the
    things that the function reads is edited. Two are drawn, by ``--draw``; ``--all`` edits all.
    """
    drawn = THINGS if pytestconfig.getoption("--all") else random.Random(os.environ["TESTS_DRAW"]).sample(THINGS, 2)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }
    command = [sys.executable, "-c", WARM, str(Path(__file__).parent), str(tmp_path), "first", "again", *drawn]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    old, new = "0.4621", "0.6351"
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [["first", "0", old], ["again", "1", old], *([thing, "0", new] for thing in drawn)]
