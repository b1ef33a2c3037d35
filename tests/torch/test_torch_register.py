"""``register``: torch gets all that a declaration says, and a failed attempt leaves nothing behind."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from importlib import import_module, reload
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import FLOATS, Op, Program, Tensor
from cute_ops.declaration.fields import without_checks
from cute_ops_torch.registry import everything

ROWS = Tensor("*m n", "T")
number = itertools.count()


def declare(name: str, **changes: Any) -> Op:
    fields: dict[str, Any] = {
        "inputs": {"x": ROWS}, "outputs": {"out": ROWS}, "dtypes": {"T": FLOATS}, "kernel": "a:B",
        "reference": lambda xp, x, **attrs: x * 2,
    }  # fmt: skip
    return Op(name, **{**fields, **changes})


def with_gradient(name: str, output: str = "out", **changes: Any) -> Op:
    rows = {output: ROWS, f"d{output}": ROWS}
    grad = declare(f"{name}_bwd", inputs=rows, outputs={"dx": ROWS}, reference=lambda xp, out, dout: dout * 2)
    return declare(name, outputs={output: ROWS}, grad=grad, **changes)


@pytest.mark.parametrize("text", ['a"b', "a'b", "a\\b", "a\nb\tc\r\0d", "\\n", "\\0017", "größe 😀", '"""', ""])
def test_any_text_can_be_a_default(text: str) -> None:
    """A backslash came to torch as another text, quotes and ends of lines not at all."""
    seen = []
    op = declare(f"text_{next(number)}", attrs={"text": text}, reference=lambda xp, x, text: seen.append(text) or x * 2)
    function, x = cute_ops_torch.register(op, "texts"), torch.ones(2, 3)
    raw = getattr(torch.ops.texts, op.name)
    assert raw.default._schema.arguments[-1].default_value == text
    for call in (function, raw, torch.compile(function, backend="eager", fullgraph=True)):
        call(x)
        call(x, text + "more")
    assert seen == [text, text + "more"] * 3


@pytest.mark.parametrize("value", [1e-7, 2.0**-1022, 1.7976931348623157e308, -0.0, 1 / 3, 1e22, -(2**63), 2**63 - 1])
def test_any_finite_number_can_be_a_default(value: Any) -> None:
    op = declare(f"number_{next(number)}", attrs={"value": value})
    cute_ops_torch.register(op, "numbers")
    assert getattr(torch.ops.numbers, op.name).default._schema.arguments[-1].default_value == value


@pytest.mark.fault(
    "register refuses a declaration, but would accept its gradient's",
    "the next call, with another declaration, works as if it were the first", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("taken", ["name", "theirs"])
def test_after_a_register_that_failed_the_next_one_works(taken: str) -> None:
    """The names are torch's own, and another library's."""
    library = torch.library.Library(f"with_{taken}", "FRAGMENT")
    library.define("theirs(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match=f"torch.ops.with_{taken}.{taken} is there already: take another name"):
        cute_ops_torch.register(with_gradient(taken), f"with_{taken}")
    again = declare("mended", grad=declare(f"{taken}_bwd", inputs={"dout": ROWS}, outputs={"dx": ROWS}))
    x = torch.ones(2, 3, requires_grad=True)
    cute_ops_torch.register(again, f"with_{taken}")(x).sum().backward()
    assert x.grad is not None and x.grad.eq(2).all()


@pytest.mark.parametrize("output", ["gradient", "zeros", "row_major", "mark", "attributes", "grad", "run", "d_out"])
def test_outputs_may_have_any_name(output: str) -> None:
    """These are names in the code of a node, too."""
    x = torch.ones(2, 3, requires_grad=True)
    made = cute_ops_torch.register(with_gradient(f"named_{output}", output), "outputs")(x)
    made.sum().backward()
    assert x.grad is not None and x.grad.eq(2).all()


@pytest.mark.slow
def test_names_that_read_alike_stay_apart_in_compiled_code() -> None:
    """Of my.ops_norm and my_ops.norm, and of an op that is called as another one's CPU kernel was."""
    made = [("my", "ops_norm", 2), ("my_ops", "norm", 3), ("my", "x", 5), ("my", "x_cpu", 7)]
    functions = [
        cute_ops_torch.register(declare(name, reference=lambda xp, x, factor=factor: x * factor), namespace)
        for namespace, name, factor in made
    ]
    program = torch.compile(lambda x: [function(x) for function in functions])
    assert [int(out[0, 0]) for out in program(torch.ones(2, 3))] == [2, 3, 5, 7]


def test_nan_is_refused_where_it_is_given() -> None:
    function = cute_ops_torch.register(declare("no_nan", attrs={"a": 1.0}), "nans")
    with pytest.raises(ValueError, match=r"^cute\.no_nan: attribute `a` is nan, expected a number"):
        function(torch.ones(2, 3), math.nan)
    assert function(torch.ones(2, 3), math.inf).eq(2).all()


MODULE = """
from cute_ops import FLOATS, Op, Program, Tensor
X = {"dtypes": {"T": FLOATS}, "kernel": "a:B"}
ROWS = Tensor("*m n", "T")
grad = Op("anew_bwd", inputs={"dout": ROWS}, outputs={"dx": ROWS}, reference=lambda xp, dout: dout * FACTOR, **X)
op = Op("anew", inputs={"x": ROWS}, outputs={"out": ROWS}, grad=grad, reference=lambda xp, x: x * FACTOR, **X)
"""


def in_a_notebook(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Declarations of two runs of a cell."""
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    for factor in "23":
        exec(MODULE.replace("FACTOR", factor), vars(program))
        yield program


def in_a_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Declarations of a module, and of the same one after it was edited."""
    monkeypatch.syspath_prepend(path)
    file = path / "declares_anew.py"
    file.write_text(MODULE.replace("FACTOR", "2"))
    yield (module := import_module("declares_anew"))
    file.write_text(MODULE.replace("FACTOR", "3.0"))
    yield reload(module)


@pytest.mark.slow
@pytest.mark.parametrize("place", [in_a_notebook, in_a_module])
def test_a_declaration_that_is_made_anew(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the name over, also in a program that looks it up; what was made of the first one stays as it is."""
    made, namespace = [], getattr(torch.ops, place.__name__)
    by_name = torch.compile(lambda x: namespace.anew(x), fullgraph=True)
    for factor, module in zip((2, 3), place(tmp_path, monkeypatch), strict=True):
        function = cute_ops_torch.register(module.op, place.__name__)
        assert cute_ops_torch.register(module.op, place.__name__) is function
        compiled = torch.compile(function, fullgraph=True)
        made += [(factor, f) for f in (function, namespace.anew, torch.vmap(function), compiled)]
        for expected, each in [*made, (factor, by_name)]:
            x = torch.ones(2, 3, requires_grad=True)
            out = each(x)
            (dx,) = torch.autograd.grad(out.sum(), x)
            assert out.eq(expected).all() and dx.eq(expected).all()
        torch.library.opcheck(namespace.anew.default, (torch.ones(2, 3, requires_grad=True),))


def test_two_declarations_of_a_name_in_one_run_are_refused() -> None:
    cute_ops_torch.register(declare("twice"), "twice")
    with pytest.raises(ValueError, match=r"torch\.ops\.twice\.twice is registered already, for another declaration"):
        cute_ops_torch.register(declare("twice"), "twice")


def test_a_program_of_a_composite() -> None:
    """What it is given and returns by name: an input that is absent, and so its gradient; dtypes despite autocast."""
    rows, bias, name = Tensor("*m k", "T"), Tensor("n", "T", optional=True), f"linear_{next(number)}"
    weight, out = Tensor("n k", "T"), Tensor("*m n", "T")

    def forward(xp: Any, call: Any, inputs: Any, attrs: Any) -> Any:
        found = call(doubled, {"x": inputs["x"] @ inputs["weight"].T}, {})["out"]
        return {"out": found if inputs["bias"] is None else found + inputs["bias"]}

    def backward(xp: Any, call: Any, inputs: Any, attrs: Any) -> Any:
        dout = call(doubled, {"x": inputs["dout"]}, {})["out"]
        dbias = None if inputs["bias"] is None else inputs["dout"].sum(0)
        return {"dx": dout @ inputs["weight"], "dweight": dout.T @ inputs["x"], "dbias": dbias}

    doubled = declare(f"{name}_doubled")
    unread = bias._replace(unread=True)
    grad = declare(
        f"{name}_bwd", inputs={"x": rows, "weight": weight, "dout": out, "bias": unread}, reference=None,
        outputs={"dx": rows, "dweight": weight, "dbias": Tensor("n", "T", given="bias")},
        kernel=Program(backward, (doubled,)),
    )  # fmt: skip
    op = declare(
        name, inputs={"x": rows, "weight": weight, "bias": bias}, outputs={"out": out}, reference=None, grad=grad,
        kernel=Program(forward, (doubled,)),
    )  # fmt: skip
    function = cute_ops_torch.register(op, "programs")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, w, b = (torch.randn(size, requires_grad=True) for size in ((3, 4), (5, 4), (5,)))
    for given in ((x, w), (x, w, b)):
        expected = 2 * x @ w.T + (b if len(given) == 3 else 0)
        gradients = torch.autograd.grad(expected.sum(), given)
        for call in (function, compiled, getattr(torch.ops.programs, name)):
            with torch.autocast("cpu", torch.bfloat16):
                found = call(*given)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), given), gradients)
    for given in ((x, w.T), (x, w, b[:3])):
        for _ in range(2):  # a call like one that was refused
            with pytest.raises(ValueError, match=rf"^cute\.{name}: argument "):
                function(*given)


def test_our_own_declarations_are_right() -> None:
    """Their import does not check them."""
    ours = [op for op, _, _ in everything()]
    assert len(ours) > 130
    for op in ours:
        op.validate()
    with without_checks():
        wrong = declare(f"unchecked_{next(number)}", dtypes={})
    with pytest.raises(ValueError, match="neither a variable nor a dtype"):
        wrong.validate()
    with pytest.raises(ValueError, match="neither a variable nor a dtype"):
        declare(f"checked_{next(number)}", dtypes={})
