"""What a declaration is refused for, in words that name the op and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cute_ops import (
    FLOATS,
    Accumulation,
    Array,
    Finish,
    Kernel,
    OneOf,
    Op,
    Program,
    Sharding,
    Split,
    Tensor,
    Tuning,
    WhileFew,
    vary,
)
from cute_ops.declaration.binding import bind
from cute_ops.declaration.program import FUSED, Fallback
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.ops import OPS, adamw, add_rmsnorm, cross_entropy, layernorm, qk_norm_rope, rmsnorm, rmsnorm_fp8

ROWS, ROW = Tensor("*m n", "T"), Tensor("n", "T")
OPTIONAL = ROW._replace(optional=True)


def declare(name: str = "mine", **changes: Any) -> Op:
    fields: dict[str, Any] = {
        "inputs": {"x": ROWS}, "outputs": {"out": ROWS}, "dtypes": {"T": FLOATS}, "reference": lambda xp, x: x,
        "kernel": "a:B",
    }  # fmt: skip
    return Op(name, **{**fields, **changes})


def backward(inputs: dict[str, Tensor] | None = None, **changes: Any) -> Op:
    fields = {"name": "mine_bwd", "inputs": inputs or {"dout": ROWS}, "outputs": {"dx": ROWS}}
    return declare(**{**fields, **changes})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "contiguous": (
        {"inputs": {"x": ROWS._replace(contiguous="k")}}, r"x: contiguous names 'k', which must .* are \['m', 'n'\]",
    ),
    "contiguous twice": ({"inputs": {"x": ROWS._replace(contiguous=("n", "n"))}}, "x: contiguous names 'n', which"),
    "contiguous, of a square": (
        {"inputs": {"x": ROWS, "y": Tensor("n n", "T", contiguous="n")}}, "y: contiguous names 'n', .* dims, once",
    ),
    "contiguous rows that broadcast": (
        {"inputs": {"x": ROWS, "y": Tensor("*#m r", "T", contiguous="m")}}, r"y: contiguous names 'm', .* \['r'\]",
    ),
    "contiguous as a list": ({"inputs": {"x": ROWS._replace(contiguous=["n"])}}, "x: contiguous must be a dim's name"),
    "contiguous columns of an output": (
        {"outputs": {"out": ROWS._replace(contiguous="m")}}, "output 'out' is made compact, so its last dim must be",
    ),
    "align": ({"inputs": {"x": ROWS._replace(align=32)}}, "x: align must be 2, 4, 8 or 16 bytes, got 32"),
    "align of an output": ({"outputs": {"out": ROWS._replace(align=16)}}, "output 'out' has 'align', which in"),
    "align without a contiguous dim": ({"inputs": {"x": ROWS._replace(align=16, contiguous=())}}, "x: align needs"),
    "otherwise": ({"inputs": {"x": ROWS._replace(otherwise="pad")}}, "x: otherwise must be 'refuse' or 'copy', got 'p"),
    "a copy that is written": (
        {"inputs": {"x": ROWS._replace(otherwise="copy")}, "mutates": ("x",)}, "x is written, so a copy cannot stand",
    ),
    "merged without leading dims": ({"outputs": {"out": ROW._replace(merged=True)}}, "out is merged, but has no"),
    "a program that takes anywhere what is no input": (
        {"fallback": Fallback(Program(dict), bool, anywhere=("y",)), "attrs": {"fused": FUSED}}, "takes 'y' anywhere",
    ),
    "a copy of an output": ({"outputs": {"out": ROWS._replace(otherwise="copy")}}, "out is written, so a copy cannot"),
    "inf": ({"attrs": {"a": math.inf}}, "attribute 'a' has the default inf, which torch's schemas cannot hold"),
    "nan": ({"attrs": {"a": math.nan}}, "attribute 'a' has the default nan"),
    "too small": ({"attrs": {"a": 5e-324}}, "attribute 'a' has the default 5e-324"),
    "None": ({"attrs": {"a": None}}, "attribute 'a' has the default None, expected one of bool, int, float, str"),
    "list": ({"attrs": {"a": [1]}}, r"attribute 'a' has the default \[1\]"),
    "65 bits": ({"attrs": {"a": 2**63}}, "attribute 'a' has the default 9223372036854775808, which is no"),
    "nan as a choice": ({"attrs": {"a": OneOf(1.0, math.nan)}}, "attribute 'a' may be nan"),
    "op is a keyword": ({"name": "lambda"}, "its name 'lambda' cannot name a function"),
    "op is not ASCII": ({"name": "größe"}, "its name 'größe'"),
    "op is private": ({"name": "_call"}, "its name '_call'"),
    "input is a keyword": ({"inputs": {"from": ROWS}}, "input 'from' cannot be an argument's name"),
    "attribute is a keyword": ({"attrs": {"lambda": 1.0}}, "attribute 'lambda' cannot be an argument's name"),
    "output is a keyword": ({"outputs": {"class": ROWS}}, "output 'class' cannot be an argument's name"),
    "input is private": ({"inputs": {"_function": ROWS}}, "input '_function' cannot be an argument's name"),
    "reserved": ({"inputs": {"ctx": ROWS}}, "input 'ctx' must have another name"),
    "attribute and output": ({"attrs": {"out": 1.0}}, r"names used twice: \['out'\]"),
    "attribute and option": (
        {"attrs": {"reduction": 1.0}, "finish": Finish(dict, {"reduction": ("sum", "none")}, {})},
        r"names used twice: \['reduction'\]",
    ),
    "no tensor": ({"inputs": {"x": "*m n"}}, r"x must be a Tensor with its shape as text, got '\*m n'"),
    "no shape": ({"inputs": {"x": Tensor(("m", "n"), "T")}}, "x must be a Tensor with its shape as text"),  # type: ignore[arg-type]
    "given": ({"outputs": {"out": ROWS._replace(given="w")}}, "output 'out' is given with 'w', which is no optional"),
    "given with what is required": ({"outputs": {"out": ROWS._replace(given="x")}}, "'x', which is no optional input"),
    "same_as": (
        {"outputs": {"out": ROWS._replace(same_as="other")}},
        "output 'out' has same_as='other': that must be another output of its shape",
    ),
    "same_as itself": ({"outputs": {"out": ROWS._replace(same_as="out")}}, "has same_as='out': that must be another"),
    "same_as in a circle": (
        {"outputs": {"a": ROWS._replace(same_as="b"), "b": ROWS._replace(same_as="a")}}, "'a' has same_as='b'",
    ),
    "same_as of another shape": (
        {"outputs": {"a": ROWS._replace(same_as="b"), "b": ROW}}, "must be another output of its shape",
    ),
    "below": ({"inputs": {"x": ROWS._replace(upper_bound="c")}}, "input 'x' has upper_bound='c', no dim of an input"),
    "below a product": (
        {"inputs": {"x": ROWS._replace(upper_bound="n*c")}}, r"input 'x' has upper_bound='n\*c', no dim of an input",
    ),
    "given of an input": ({"inputs": {"x": ROWS._replace(given="x")}}, "input 'x' is given with 'x': both must be opt"),
    "optional output": ({"outputs": {"out": ROWS._replace(optional=True)}}, "output 'out' has 'optional', which"),
    "no output": ({"outputs": {}}, "it has no output that is not hidden"),
    "hidden": ({"outputs": {"out": ROWS._replace(hidden=True)}}, "it has no output that is not hidden"),
    "mutates what is no input": ({"mutates": ("out",)}, r"it mutates \['out'\], which are no inputs; there"),
    "mutates as text": ({"mutates": "x"}, "mutates must be a tuple of names, got 'x'"),
    "mutates twice": ({"mutates": ("x", "x")}, "mutates has 'x' twice"),
    "mutates what is not read": (
        {"inputs": {"x": ROWS._replace(unread=True)}, "mutates": ("x",)}, "it mutates 'x', which broadcasts or is not",
    ),
    "mutates what is donated": (
        {"mutates": ("x",), "outputs": {"out": ROWS._replace(donates="x")}}, "output 'out' donates 'x', which the op",
    ),
    "mutates with a gradient": ({"mutates": ("x",), "grad": backward()}, "it mutates inputs, so it cannot have the"),
    "mutates with a finish": (
        {"mutates": ("x",), "finish": Finish(dict, {"by": ("sum", "none")}, {})}, "it mutates inputs, so it has no",
    ),
    "mutates with a search space": (
        {"mutates": ("x",), "tuning": Tuning(dict, vary(threads=(64,)))}, "its config cannot be measured",
    ),
    "mutates and splits": (
        {"mutates": ("x",), "sharding": Sharding(split=Split("n", dict))}, "it mutates inputs, so it cannot be split",
    ),
    "a flag as a scalar": ({"scalars": {"a": True}}, "scalar 'a' has the default True, expected one of int, float"),
    "nan as a scalar's default": ({"scalars": {"a": math.nan}}, "scalar 'a' has the default nan, which torch's"),
    "attribute and scalar": ({"attrs": {"a": 1.0}, "scalars": {"a": 1.0}}, r"names used twice: \['a'\]"),
    "a scalar that the gradient has as an attribute": (
        {"scalars": {"a": 1.0}, "grad": backward(attrs={"a": 1.0})},
        "gradient mine_bwd has the attribute 'a', which nothing gives it: mine has none",
    ),
    "no dtypes": ({"dtypes": {"T": ()}}, "dtype variable T must have a tuple of dtype names"),
    "dtypes as text": ({"dtypes": {"T": "float32"}}, "dtype variable T must have a tuple of dtype names, got"),
    "unknown dtype": ({"dtypes": {"T": ("float33",)}}, "dtype variable T may be 'float33', which is none of bfloat16"),
    "the dtype of an attribute of any value": (
        {"attrs": {"to": "float32"}, "outputs": {"out": Tensor("*m n", "to")}},
        r"out has the dtype that attribute 'to' names, which must say what it may be: OneOf\('float32', \.\.\.\)",
    ),
    "the dtype of an attribute that is none": (
        {"attrs": {"to": OneOf("float32", "float33")}, "outputs": {"out": Tensor("*m n", "to")}},
        "out has the dtype that attribute 'to' names, which may be 'float33', none of bfloat16",
    ),
    "the dtype of a number": (
        {"attrs": {"to": 1.0}, "outputs": {"out": Tensor("*m n", "to")}}, "'to' names, which may be 1.0, none of bfl"
    ),
    "an input's dtype by attribute": (
        {"attrs": {"to": OneOf("float32")}, "inputs": {"x": ROWS, "w": Tensor("n", "to")}},
        "w has the dtype that attribute 'to' names, as only outputs may",
    ),
    "another's array with the dtype of an attribute": (
        {"attrs": {"to": OneOf("float32")},
         "outputs": {"out": ROWS, "other": Tensor("*m n", "to", same_as="out")}},
        "other has the dtype that attribute 'to' names, so it cannot share an array by 'same_as'",
    ),
    "an attribute and a dtype variable": ({"attrs": {"T": OneOf("float32")}}, r"names used twice: \['T'\]"),
    "dtype of no input": (
        {"dtypes": {"T": FLOATS, "U": FLOATS}, "outputs": {"out": Tensor("*m n", "U")}},
        "output 'out' has dtype U, which no input has",
    ),
    "dtype of an absent input": (
        {"dtypes": {"T": FLOATS, "U": FLOATS}, "inputs": {"x": ROWS, "w": Tensor("n", "U", optional=True)},
         "outputs": {"out": Tensor("*m n", "U")}},
        "output 'out' has dtype U, which no input has that is present whenever it is",
    ),
    "dim of an absent input": (
        {"inputs": {"x": ROWS, "w": Tensor("k", "T", optional=True)}, "outputs": {"out": Tensor("*m k", "T")}},
        "out has dim k, neither an input's nor in `derived`",
    ),
    "a dim and leading dims of one name": (
        {"inputs": {"x": Tensor("*n n", "T")}, "outputs": {"out": Tensor("*n n", "T")}},
        r"'n' is a dim, and \*n are leading dims: take two names",
    ),
    "leading dims of no input": ({"outputs": {"out": Tensor("*p n", "T")}}, r"out has leading dims \*p, which are no"),
    "a size rounded up that nothing binds": (
        {"inputs": {"x": Tensor("*m ceil(n/2)", "T")}},
        r"x: nothing says how large n is in 'ceil\(n/2\)'; a dim of a required input must be that name, or an "
        "expression without 'ceil' of which it is the only unknown",
    ),
    "a product of two names that nothing binds": (
        {"inputs": {"x": Tensor("*m g*r", "T")}, "outputs": {"out": Tensor("*m", "T")}},
        r"x: nothing says how large g is in 'g\*r'",
    ),
    "a square": ({"inputs": {"x": Tensor("*m n*n", "T")}}, r"x: nothing says how large n is in 'n\*n'"),
    "a product that only another absent input binds": (
        {"inputs": {"x": ROWS, "a": Tensor("g", "T", optional=True), "b": Tensor("g*r", "T", optional=True)}},
        r"b: nothing says how large g is in 'g\*r'; a dim of it or a required input must be that name",
    ),
    "an output of an unknown size": ({"outputs": {"out": Tensor("*m k+1", "T")}}, "out has dim k, neither an input's"),
    "static": ({"static": ("k",)}, r"static has 'k', which is no dim of an input; there are \['n'\]"),
    "static while few": ({"static": (WhileFew("k"),)}, "static while few has 'k', which is no dim of a required input"),
    "static always and while few": ({"static": ("n", WhileFew("n"))}, "static has 'n' twice"),
    "static as text": ({"static": "n"}, "static must be a tuple of names, got 'n'"),
    "an input that comes with a required one": (
        {"inputs": {"x": ROWS, "w": ROW._replace(optional=True, given="x")}}, "input 'w' is given with 'x': both must",
    ),
    "static while few of an absent input": (
        {"static": WhileFew("k"), "inputs": {"x": ROWS, "w": Tensor("k", "T", optional=True)}}, "few has 'k'",
    ),
    "parallel": ({"sharding": Sharding(("k",))}, r"parallel has 'k', which is no dim of an input; there are \['n'\]"),
    "contracted": ({"sharding": Sharding(contracted=("k",))}, "contracted has 'k', which is no dim of an input"),
    "inner": ({"sharding": Sharding(inner=("k",))}, "inner has 'k', which is no dim of an input"),
    "inner without a program": ({"sharding": Sharding(inner=("n",))}, "inner has 'n', over which only a program can"),
    "parallel heads of groups that are not tied": (
        {"inputs": {"q": Tensor("*m h d", "T"), "k": Tensor("*m g d", "T")}, "outputs": {"out": Tensor("*m h d", "T")},
         "sharding": Sharding(("h", "g"))},
        "parallel has 'g', which output 'out' lacks: .*; a dim that 'out' is a sum over is contracted",
    ),
    "split": ({"sharding": Sharding(split=Split("k", dict))}, "it splits 'k', which is no dim of an input"),
    "sources as text": (
        {"kernel": Kernel("a:B", sources="data/table.bin")},  # type: ignore[arg-type]
        "sources must be a tuple of names, got 'data/table.bin'",
    ),
    "derived": ({"derived": {"n": lambda dims, attrs: 1}}, "dim 'n' is derived, but an input binds it"),
    "no class": ({"kernel": "a:"}, "kernel must be 'module:Class', got 'a:'"),
    "a file": ({"kernel": "kernels/a.py:B"}, "kernel must be 'module:Class', got 'kernels/a.py:B'"),
    "a space for its tuning": ({"tuning": vary(threads=(64,))}, r"tuning must be a Tuning, got Space\("),
    "a number for its kernel": ({"kernel": 7}, "kernel must be a str, Kernel or Program, got 7"),
    "a dim for its sharding": ({"sharding": "n"}, "sharding must be a Sharding, got 'n'"),
    "a bucket of no dim": (
        {"tuning": Tuning(space=vary(threads=(64,), buckets={"k": (8,)}))},
        r"buckets has 'k', which is no dim of a required input; there are \['m', 'n'\]",
    ),
    "buckets that fall": (
        {"tuning": Tuning(space=vary(threads=(64,), buckets={"m": (512, 64)}))},
        r"buckets of 'm' must be rising sizes, \(64, 512\), got \(512, 64\)",
    ),
    "a sum over no dim": (
        {"outputs": {"out": ROWS._replace(accumulates=Accumulation(("k",)))}},
        r"output 'out' accumulates over 'k', no dim of an input; there are \['m', 'n'\]",
    ),
    "a sum in integers": (
        {"outputs": {"out": ROWS._replace(accumulates=Accumulation(("n",), "int32"))}},
        "output 'out' accumulates in 'int32', which is none of float32, float22, float16",
    ),
    "a sum of an input": (
        {"inputs": {"x": ROWS._replace(accumulates=Accumulation(("n",)))}}, "input 'x' has 'accumulates', which out",
    ),
    "a kernel without a reference": ({"reference": None}, "it has a kernel, so it must have a reference"),
    "a program that writes": ({"kernel": Program(dict), "mutates": ("x",)}, "it mutates inputs, which a program"),
    "a program that is narrowed": (
        {"kernel": Program(dict), "outputs": {"out": ROWS, "more": ROWS._replace(skippable=True)}},
        "output 'more' has 'skippable', but a program returns all outputs",
    ),
    "a program that is split": (
        {"kernel": Program(dict), "sharding": Sharding(split=Split("n", dict))}, "what each device does with a slice",
    ),
    "SM": ({"kernel": Kernel("a:B", least_sm=8.9)}, "least_sm must be a whole number, 89 for SM 8.9, got 8.9"),
    "an attribute that the gradient lacks": (
        {"attrs": {"a": 1.0}, "grad": backward()},
        r"attribute 'a' does not reach the gradient: mine_bwd has none; if that is intended, declare "
        r"no_gradient=\('a',\)",
    ),
    "an attribute of another kind": (
        {"attrs": {"a": 1.0}, "grad": backward(attrs={"a": 1})}, "attribute 'a' is float, but in mine_bwd int",
    ),
    "an input without a gradient": (
        {"inputs": {"x": ROWS, "mask": ROWS}, "grad": backward()},
        r"input 'mask' has no gradient: mine_bwd gives no 'dmask'; if that is intended, declare "
        r"no_gradient=\('mask',\)",
    ),
    "a gradient that is denied": (
        {"grad": backward(), "no_gradient": ("x",)}, "input 'x' has no gradient by `no_gradient`, but mine_bwd",
    ),
    "no_gradient of nothing": ({"grad": backward(), "no_gradient": ("y",)}, r"no_gradient has \['y'\], which are"),
    "no_gradient without one": ({"no_gradient": ("x",)}, r"it has no_gradient=\('x',\), but declares no grad"),
    "a gradient of nothing": (
        {"grad": backward(outputs={"dx": ROWS, "dy": ROWS})}, r"mine_bwd has the outputs \['dy'\], which are no 'd'",
    ),
    "a gradient of what is absent": (
        {"inputs": {"x": ROWS, "w": OPTIONAL}, "grad": backward({"dout": ROWS, "w": OPTIONAL},
         outputs={"dx": ROWS, "dw": ROW})},
        "mine_bwd gives 'dw' also where there is no 'w': declare it with given='w'",
    ),
    "a gradient of an attribute of its own": (
        {"grad": backward(attrs={"a": 1.0})}, "mine_bwd has the attribute 'a', which nothing gives it: mine has none",
    ),
    "a gradient of no op": ({"grad": (backward(), "mine_bwd")}, "grad must be an Op or a tuple of Ops, got"),
    "a gradient twice": (
        {"grad": (backward(), backward(name="again"))}, "'dx' is given by two steps of the gradient, mine_bwd and",
    ),
    "a step that reads what comes later": (
        {"grad": (backward({"inner": ROWS}), backward(name="first", outputs={"inner": ROWS}))},
        "gradient mine_bwd reads 'inner', which first gives, but not before it",
    ),
    "a step that nobody reads": (
        {"grad": (backward(name="first", outputs={"inner": ROWS}), backward())},
        r"first has the outputs \['inner'\], which are no 'd' .* and no later step reads them",
    ),
    "a step that gives what it is given": (
        {"grad": (backward(name="first", inputs={"x": ROWS}, outputs={"dout": ROWS}), backward())},
        "first gives 'dout', which is the name of something that it is given",
    ),
    "a step that overwrites what the next one reads": (
        {"inputs": {"x": ROWS, "y": ROWS}, "grad": (
            backward(name="first", outputs={"dx": ROWS._replace(donates="dout")}), backward(outputs={"dy": ROWS}))},
        "first may write 'dx' over 'dout', but a later step reads 'dout'",
    ),
    "a cotangent that is handed on to nobody": (
        {"grad": backward(), "handed_on": {"y": "out"}}, "handed_on gives 'y' the cotangent of 'out': an input, and an",
    ),
    "a cotangent of another shape": (
        {"inputs": {"x": ROWS, "w": ROW}, "grad": backward(), "handed_on": {"w": "out"}},
        "handed_on gives 'w' the cotangent of 'out': an input, and an output of its shape",
    ),
    "a cotangent beside a gradient": (
        {"grad": backward(), "handed_on": {"x": "out"}},
        "handed_on gives 'x' a gradient, but mine_bwd gives 'dx'",
    ),
    "scaled by what is no number": (
        {"scaled": {"x": "out"}}, "its gradients are scaled by the cotangent of 'out', which must be a scalar",
    ),
    "scaled beside another output": (
        {"outputs": {"loss": Tensor("", "T"), "out": ROWS}, "scaled": {"x": "kept"}}, "a scalar and no output beside",
    ),
    "scaled from nothing": (
        {"outputs": {"loss": Tensor("", "T")}, "scaled": {"x": "kept"}},
        "scaled gives 'x' the gradient 'kept': an input, and an output of its shape and dtype",
    ),
    "scaled beside a gradient": (
        {"outputs": {"loss": Tensor("", "T"), "kept": ROWS}, "scaled": {"x": "kept"},
         "grad": backward(inputs={"dloss": Tensor("", "T"), "x": ROWS})},
        "scaled gives 'x' a gradient, but mine_bwd gives 'dx'",
    ),
    "strides that no program makes": (
        {"outputs": {"out": ROWS._replace(strided_like="x")}}, "output 'out' has strided_like='x': it takes an input",
    ),
    "a cotangent, and no gradient": ({"handed_on": {"x": "out"}}, "it has handed_on or saving, but declares no"),
    "what is saved by another op": (
        {"grad": backward(), "saving": declare("saving", attrs={"a": 1.0})},
        "saving saves for its gradient, but has other inputs or attributes",
    ),
    "what is saved with other outputs": (
        {"grad": backward(), "saving": declare("saving", outputs={"kept": ROWS, "out": ROWS})},
        "saving saves for its gradient, but does not have its outputs first",
    ),
    "a fallback, and no choice": (
        {"fallback": Fallback(Program(dict), bool)}, "so it must declare the attribute fused=FUSED",
    ),
    "a fallback of a program": (
        {"kernel": Program(dict), "fallback": Fallback(Program(dict), bool), "attrs": {"fused": FUSED}},
        "a fallback runs in place of a kernel, but it has a program",
    ),
    "skippable input": ({"inputs": {"x": ROWS._replace(skippable=True)}}, "input 'x' has 'skippable', which outputs"),
    "skippable, but serves for two": (
        {"outputs": {"a": ROWS._replace(same_as="b"), "b": ROWS._replace(skippable=True)}},
        "output 'a' has same_as='b': an output that stands for two",
    ),
    "skippable, but merged": (
        {"outputs": {"a": ROWS._replace(skippable=True)}, "sharding": Sharding(split=Split("n", dict, dict))},
        "output 'a' is skippable, but the merge of slices takes all outputs",
    ),
    "skippable outputs whose names are joined": (
        {"outputs": {name: ROWS._replace(skippable=True) for name in ("a", "b", "a_b")}},
        "narrowed to some outputs it has one name twice",
    ),
    "an argument or a cotangent": (
        {"inputs": {"x": ROWS, "dout": ROWS}, "grad": backward(), "no_gradient": ("dout",)},
        "mine_bwd reads 'dout': that argument, or the cotangent of 'out'",
    ),
}  # fmt: skip


@pytest.mark.fault(
    "a declaration whose default, name, dim, dtype or reference to another argument no framework accepts",
    "the declaration raises an error that names the op and what is wrong", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_work_is_refused_where_it_is_declared(wrong: str) -> None:
    changes, message = WRONG[wrong]
    with pytest.raises(ValueError, match=f"^op {changes.get('name', 'mine')}: .*{message}"):
        declare(**changes)


def test_what_is_without_a_gradient_says_so() -> None:
    op = declare(
        inputs={"x": ROWS, "mask": ROWS, "index": Tensor("*m", "int32")}, attrs={"a": 1.0}, grad=backward(),
        no_gradient=("mask", "a"),
    )  # fmt: skip
    assert op.differentiable == ("x",)
    assert all(set(op.no_gradient).isdisjoint(op.differentiable) for op in OPS)


def test_n_is_static_only_where_there_is_one() -> None:
    """It was a KeyError in the first call on a GPU."""
    op = declare(inputs={"x": Tensor("*m k", "T")}, outputs={"out": Tensor("*m k", "T")}, kernel="cute_ops.kernels:K")
    assert op.static == () and declare().static == declare().few == ("n",) and declare(static=()).static == ()
    assert plan(bind(op, {"x": Array((3, 8), "float32")}), {}, parse("sm_90a")).variant.dims == {}


X, W = Array((3, 8), "float32"), Array((8,), "float32")
HEADS, TABLE = Array((3, 2, 8), "float32"), Array((3, 4), "float32")
NORM = {"x": X, "weight": W}
LOSS = {"logits": X, "target": Array((3,), "int32")}
STEP = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), X) | dict.fromkeys(
    ("keep", "step_size", "scale"), Array((3,), "float32")
)
RANGES: list[tuple[Op, dict[str, Array], str, Any, str]] = [
    *(
        (op, {**NORM, **more}, "eps", -1e-6, "-1e-06, expected a finite number of at least 0")
        for op, more in ((rmsnorm, {}), (add_rmsnorm, {"residual": X}), (layernorm, {}), (rmsnorm_fp8, {}))
    ),
    (rmsnorm, NORM, "eps", math.inf, "inf, expected a finite number of at least 0"),
    (rmsnorm, NORM, "weight_offset", -math.inf, "-inf, expected a finite number"),
    (rmsnorm, NORM, "eps", math.nan, "nan, expected a number"),
    (
        qk_norm_rope,
        {"q": HEADS, "k": HEADS, "q_weight": W, "k_weight": W, "cos": TABLE, "sin": TABLE},
        "eps", -1.0, "-1.0, expected a finite number of at least 0",
    ),
    (cross_entropy, LOSS, "label_smoothing", 2.0, "2.0, expected a number from 0 to 1"),
    (cross_entropy, LOSS, "label_smoothing", -0.1, "-0.1, expected a number from 0 to 1"),
    (cross_entropy, LOSS, "z_loss", math.inf, "inf, expected a number from -1e"),
    (cross_entropy, LOSS, "ignore_index", 2**31, "2147483648, which no target of int32 can be"),
    (cross_entropy, LOSS, "ignore_index", -(2**63) - 1, "-9223372036854775809, expected a number of 64 bits"),
    (adamw, STEP, "beta1", 1.0, "1.0, expected a number from 0 to below 1"),
    (adamw, STEP, "beta2", -0.5, "-0.5, expected a number from 0 to below 1"),
    (adamw, STEP, "eps", -1e-8, "-1e-08, expected a finite number of at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "name", "value", "problem"), RANGES)
def test_attributes_out_of_their_range_are_refused(
    op: Op, inputs: dict[str, Array], name: str, value: Any, problem: str
) -> None:
    assert bind(op, inputs).attrs[name] == op.attrs[name]
    with pytest.raises(ValueError, match=f"^cute.{op.name}: attribute `{name}` is {problem}"):
        bind(op, inputs, {name: value})


def test_every_gradient_refuses_what_its_op_refuses() -> None:
    """A backward op is a public op, too."""
    for op, inputs, name, value, problem in RANGES:
        if op.grad is None:
            continue
        known = {**inputs, "residual_out": X, **dict.fromkeys(("row_max", "log_sum", "dloss"), Array((3,), "float32"))}
        given = {n: known.get(n, HEADS if "d" in op.static else X) for n, t in op.grad.inputs.items() if not t.optional}
        bind(op.grad, given)
        with pytest.raises(ValueError, match=f"attribute `{name}` is {problem}"):
            bind(op.grad, given, {name: value})


def test_a_scalar_may_be_any_number() -> None:
    op, given = declare(scalars={"a": 1.0, "k": 0}), {"x": X}
    for value in (2, -0.0, math.inf, math.nan):
        assert repr(bind(op, given, {"a": value}).attrs["a"]) == repr(float(value))
    with pytest.raises(TypeError, match=r"^cute.mine: scalar `a` must be float, got True"):
        bind(op, given, {"a": True})
    with pytest.raises(TypeError, match=r"^cute.mine: scalar `k` must be int, got 1.0"):
        bind(op, given, {"k": 1.0})
    with pytest.raises(ValueError, match=r"scalar `k` is 9223372036854775808, expected a number of 64 bits"):
        bind(op, given, {"k": 2**63})


def test_a_zero_keeps_its_sign() -> None:
    """-0.0 equals 0.0, but is another number."""
    for zero in (0.0, -0.0):
        bound = bind(rmsnorm, NORM, {"weight_offset": zero}).attrs["weight_offset"]
        assert math.copysign(1.0, bound) == math.copysign(1.0, zero)


def test_a_gradient_is_the_ops_that_somebody_reads(product: Any) -> None:
    inner, dgrad, wgrad = product.op.steps
    for wanted, ops in (("xw", (inner, dgrad, wgrad)), ("x", (inner, dgrad)), ("w", (inner, wgrad)), ("", ())):
        assert product.op.backward(wanted, "xw") == ops
    assert product.op.differentiable == ("x", "w")


@pytest.mark.parametrize(
    ("wanted", "absent", "suffix"),
    [
        (("x", "weight", "bias"), (), ""), (("x", "weight"), ("bias",), ""), (("x",), ("weight", "bias"), ""),
        (("x",), (), "_only_dx"), (("x",), ("bias",), "_only_dx"), (("weight",), (), "_only_dweight"),
        (("bias",), ("weight",), "_only_dbias"), (("x", "bias"), ("weight",), ""),
        (("x", "weight"), (), "_only_dx_dweight"),
    ],
)  # fmt: skip
def test_a_backward_op_leaves_out_what_nobody_wants(wanted: Any, absent: Any, suffix: str) -> None:
    """What is absent anyway narrows no op: calls with all that there is keep their kernels."""
    (op,) = rmsnorm.backward(wanted, [name for name in rmsnorm.inputs if name not in absent])
    assert op.name == f"rmsnorm_bwd{suffix}" and (op is rmsnorm.grad) == (not suffix)
    given = {"x": X, "dout": X, **{name: W for name in ("weight", "bias") if name not in absent}}
    variant = plan(bind(op, given), {}, parse("sm_90a")).variant
    passed = {name: variant.tensors[name] is not None for name in ("dx", "dweight", "dbias")}
    assert passed == {name: name in op.outputs and name[1:] not in absent for name in passed}


def test_a_declaration_by_position() -> None:
    """What is too much is said before what is missing."""
    with pytest.raises(TypeError, match=r"^cute\.Op: 3 arguments were given by position; it takes `name`\.$"):
        Op("by_position", {}, {})  # type: ignore[call-arg, misc]
