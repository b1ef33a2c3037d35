"""Statements of a ``forward`` that apply one module after another to a value, and a ``forward`` with a call in place.

``x = self.act(self.fc1(x))`` and ``x = self.fc2(x)`` are such statements, with torch's functions for activations and
dropout, and T5's cast to a weight's dtype. A class may have them as its whole ``forward``, as ViT's MLP, or among
others, as a layer of Whisper.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from cute_ops_torch.huggingface.match import Forward
from cute_ops_torch.huggingface.source import DEFINITION, copied, definition, unify

_ACTIVATIONS: dict[Any, str] = {
    functional.gelu: "gelu", functional.silu: "silu", functional.relu: "relu", torch.relu: "relu",
}  # fmt: skip
# T5 keeps a weight in float32 when its model is narrower.
_CAST = """
if (
    isinstance(self.{name}.weight, torch.Tensor)
    and x.dtype != self.{name}.weight.dtype
    and self.{name}.weight.dtype != torch.int8
):
    x = x.to(self.{name}.weight.dtype)
"""


class Step(NamedTuple):
    """A step of a value: a ``call`` of the module of this name, torch's activation (``act``) of this name, ``dropout``
    with the attribute of this name as its probability, or a ``cast`` to the dtype of that module's weight.
    """

    kind: str
    name: str


class Run(NamedTuple):
    """Neighbouring statements that only do steps, one after another.

    Attributes:
        steps: what they do.
        block: the statements that they are among.
        start, end: their places in it.
        source: the name of the value that the first one reads.
        target: the name that the last one gives it; empty where that returns it.
    """

    steps: tuple[Step, ...]
    block: list[ast.stmt]
    start: int
    end: int
    source: str
    target: str


@cache
def steps_of(function: Any) -> tuple[tuple[Step, ...], ...]:
    """The steps of each run of a function, which may have no closure."""
    tree = definition(function) if isinstance(function, types.FunctionType) else None
    if tree is None or function.__code__.co_freevars:
        return ()
    return tuple(dict.fromkeys(run.steps for run in _runs(tree, _scope(function))))


def with_call(function: Any, steps: tuple[Step, ...], call: Forward) -> Forward:
    """The function with ``found = call(self, source)`` before the first run of these steps, whose statements it leaves
    out unless that is None.
    """
    plain, tree = function, copied(definition(function))
    assert tree is not None  # it has steps
    run = next(run for run in _runs(tree, _scope(plain)) if run.steps == steps)
    me = plain.__code__.co_varnames[0]
    first = run.block[run.start]
    gives = f"{run.target} = _cute_found" if run.target else "return _cute_found"
    added: list[Any] = ast.parse(
        f"_cute_found = _cute_call({me}, {run.source})\nif _cute_found is None:\n pass\nelse:\n {gives}"
    ).body
    for node in (each for statement in added for each in ast.walk(statement)):
        ast.copy_location(node, first)
    added[1].body = run.block[run.start : run.end]
    run.block[run.start : run.end] = added
    return compiled(tree, plain, {"_cute_call": call})


def compiled(tree: ast.FunctionDef, plain: Any, names: dict[str, Forward]) -> Forward:
    """The function of this definition, which is that of ``plain`` with changes, in its scope and with these names."""
    changed = copied(tree)
    module = ast.fix_missing_locations(ast.Module([tree], []))
    ast.increment_lineno(module, plain.__code__.co_firstlineno - 1)  # tracebacks show the original's lines
    # Leave out `__name__`: Dynamo would look names up in the module of that name.
    scope = {k: v for k, v in plain.__globals__.items() if k != "__name__"} | names
    made = dict[str, Any]()
    exec(compile(module, plain.__code__.co_filename, "exec", dont_inherit=True), scope, made)
    found: Any = made[tree.name]
    found.__defaults__, found.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    vars(found)[DEFINITION] = changed
    return found  # type: ignore[no-any-return]


def _scope(function: Any) -> dict[str, Any]:
    """The globals that a function may read: those that no parameter or local of it hides."""
    code = function.__code__
    own = {*code.co_varnames, *code.co_cellvars}
    return {name: value for name, value in function.__globals__.items() if name not in own}


def _runs(tree: ast.FunctionDef, scope: dict[str, Any]) -> Iterator[Run]:
    """The runs of every block, longer ones first."""
    me = tree.args.args[0].arg if tree.args.args else ""
    for block in _blocks(tree):
        read = [_steps(statement, me, scope) for statement in block]
        for start in range(len(block)):
            steps, between, source, target = list[Step](), set[str](), "", ""
            found = []
            for end in range(start, len(block)):
                one = read[end]
                if one is None or (steps and one[0] != target):
                    break
                source, target = source or one[0], one[1]
                steps += one[2]
                if not target or not _read_later(tree, between - {target}, block[start : end + 1]):
                    found.append(Run((*steps,), block, start, end + 1, source, target))
                if not target:
                    break
                between.add(target)
            yield from reversed(found)


def _read_later(tree: ast.FunctionDef, names: set[str], statements: list[ast.stmt]) -> bool:
    """Whether one of these names may be read after some statements."""
    within = {node for statement in statements for node in ast.walk(statement)}
    inner = [node for statement in tree.body for node in ast.walk(statement)]
    repeats = any(isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda) for node in inner)
    end = 0 if repeats else statements[-1].lineno
    return any(
        isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load) and node.lineno >= end
        for node in inner if node not in within
    )  # fmt: skip


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _steps(statement: ast.stmt, me: str, scope: dict[str, Any]) -> tuple[str, str, list[Step]] | None:
    """The value that a statement reads, the name of its result, and its steps; None of any other statement."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: Any = statement.targets[0]
        found = _of_value(statement.value, me, scope) if isinstance(target, ast.Name) else None
        return found and (found[0], target.id, found[1])
    if isinstance(statement, ast.Return) and statement.value is not None:
        found = _of_value(statement.value, me, scope)
        return found and (found[0], "", found[1])
    return _of_cast(statement, me) if isinstance(statement, ast.If) else None


def _of_cast(statement: ast.If, me: str) -> tuple[str, str, list[Step]] | None:
    attributes = [n for n in ast.walk(statement) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    names = {n.attr for n in attributes if n.value.id == me}  # type: ignore[attr-defined]
    if len(names) != 1:
        return None
    (name,) = names
    renamed = unify(_CAST.format(name=name), [statement])
    return None if renamed is None else (renamed["x"], renamed["x"], [Step("cast", name)])


def _of_value(value: ast.expr, me: str, scope: dict[str, Any]) -> tuple[str, list[Step]] | None:
    """The name that an expression reads, and its steps; None of another expression."""
    if isinstance(value, ast.Name):
        return value.id, []
    if not (isinstance(value, ast.Call) and value.args):
        return None
    inner, step = _of_value(value.args[0], me, scope), None
    owner = value.func.value if isinstance(value.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and owner.id == me:
        step = Step("call", value.func.attr) if len(value.args) == 1 and not value.keywords else None  # type: ignore[attr-defined]
    elif len(value.args) == 1:
        given = {str(k.arg): ast.unparse(k.value) for k in value.keywords}
        step = _of_function(_meant(value.func, scope), given, me)
    return None if inner is None or step is None else (inner[0], [*inner[1], step])


def _of_function(function: Any, given: dict[str, str], me: str) -> Step | None:
    """The step of a call of one of torch's functions with these arguments behind the first; None of another call."""
    if function is functional.dropout:
        name = given.get("p", "").rpartition(".")[2]
        return Step("dropout", name) if given == {"p": f"{me}.{name}", "training": f"{me}.training"} else None
    if function is functional.gelu and given == {"approximate": "'tanh'"}:
        return Step("act", "gelu_tanh")
    name = next((name for each, name in _ACTIVATIONS.items() if each is function), "")
    return Step("act", name) if name and not given else None


def _meant(function: ast.expr, scope: dict[str, Any]) -> Any:
    """The object that a dotted name refers to; None where there is none."""
    first, *names = ast.unparse(function).split(".")
    found = scope.get(first)
    for name in names:
        found = getattr(found, name, None)
    return found
