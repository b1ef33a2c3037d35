"""Group norms whose output goes to a SiLU and nowhere else, in one pass, as in the blocks of image models.

``h = self.norm1(x)``, then ``h = self.nonlinearity(h)``, or both in one statement, become two calls: the first waits,
and the second computes both. Statements show that nothing else reads the norm's output and that nothing happens in
between; what the modules are, and that nobody looks at them, is asked at each call. A ``Sequential`` has neighbours in
place of statements.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cute_ops_torch.huggingface.bypass import calls, runs
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, named_as
from cute_ops_torch.huggingface.norm import group_norm_forward, run_group_norm, takes_image
from cute_ops_torch.huggingface.plain_mlp import activation_of, learn
from cute_ops_torch.huggingface.source import copied, definition
from cute_ops_torch.huggingface.statements import compiled

Tensor = torch.Tensor
_LATER, _NOW = "_cute_later", "_cute_now"
# Functions of one tensor that are SiLU: torch's, and those found in models.
_SILU: dict[Any, bool] = {nn.functional.silu: True}


class Waiting:
    """A norm that has not run yet, and its input."""

    def __init__(self, norm: Any, x: Tensor) -> None:
        self.norm, self.x = norm, x


def later(norm: Any, x: Any) -> Any:
    """The norm, to be computed with the activation behind it if it is ours; else its output."""
    return Waiting(norm, x) if _is_ours(norm, x) else norm(x)


def now(act: Any, value: Any) -> Any:
    """``act(value)``, with the norm before it in one pass if it waits and the activation is SiLU."""
    if type(value) is not Waiting:
        return act(value)
    norm, x = value.norm, value.x
    return run_group_norm(norm, x, "silu") if _is_silu(act) else act(norm(x))


def _is_ours(norm: Any, x: Any) -> bool:
    """Whether calling a module runs our group norm of a tensor, and nothing that sees its output."""
    return isinstance(norm, nn.GroupNorm) and runs(norm, group_norm_forward) and takes_image(norm, x)


def _is_silu(act: Any) -> bool:
    if isinstance(act, nn.Module):
        return activation_of(act) == "silu"
    return act in _SILU if isinstance(act, types.FunctionType) else False


def _may_be_silu(act: Any) -> bool:
    """Whether an activation that a module calls is SiLU; a function is known from now on."""
    if isinstance(act, nn.Module):
        return learn(act) == "silu"
    if isinstance(act, types.FunctionType) and act not in _SILU and _computes_silu(act):
        _SILU[act] = True
    return _is_silu(act)


@cache
def _computes_silu(function: types.FunctionType) -> bool:
    """Whether a function of one tensor, a single ``return`` of torch's functions, gives what SiLU gives."""
    tree, code = definition(function), function.__code__
    if tree is None or code.co_freevars or code.co_argcount != 1 or [type(s) for s in tree.body] != [ast.Return]:
        return False
    known = all(isinstance(function.__globals__.get(name, torch), types.ModuleType) for name in code.co_names)
    if not known or function.__module__.startswith("torch."):
        return False
    x = torch.linspace(-40, 40, 801, dtype=torch.float64)
    try:
        return torch.allclose(function(x), nn.functional.silu(x), rtol=1e-12, atol=1e-12)
    except Exception:  # a function of anything else
        return False


# --- modules with statements -----------------------------------------------------------------------------------------


def _with_calls(original: Any) -> Forward:
    """The ``forward`` whose norms wait for the activations behind them."""
    tree = copied(definition(original))
    assert tree is not None  # it has pairs
    for norms, act in _pairs(tree, original.__code__.co_varnames[0]):
        for call, name in (*((norm, _LATER) for norm in norms), (act, _NOW)):
            call.args, call.func = [call.func, *call.args], ast.copy_location(ast.Name(name, ast.Load()), call)
    return compiled(tree, original, {_LATER: later, _NOW: now})


def _pairs(tree: ast.FunctionDef, me: str) -> list[tuple[list[ast.Call], ast.Call]]:
    """Calls of modules whose results nothing but an activation reads, with the call of that."""
    return [*_in_block(tree, tree.body, me, {})]


Pending = dict[str, list[ast.Call]]


def _in_block(
    tree: ast.FunctionDef, block: list[ast.stmt], me: str, pending: Pending
) -> Iterator[tuple[list[ast.Call], ast.Call]]:
    """The pairs of a block. ``pending``: by name, the calls of modules whose results it may have when the block begins;
    afterwards, when it ends.
    """
    for statement in block:
        inner = [getattr(statement, field, None) or [] for field in ("body", "orelse", "finalbody", "handlers")]
        if not any(inner):
            yield from _in_statement(tree, statement, me, pending)
            continue
        pending.clear()
        for statements in inner:
            end: Pending = {}
            yield from _in_block(tree, statements, me, end)
            for name, found in end.items() if isinstance(statement, ast.If) else ():
                pending.setdefault(name, []).extend(found)


def _in_statement(
    tree: ast.FunctionDef, statement: ast.stmt, me: str, pending: Pending
) -> Iterator[tuple[list[ast.Call], ast.Call]]:
    """The pairs whose activation a statement calls; ``pending`` afterwards has the call whose result it names."""
    chain, source = _chain(statement)
    target, norms = _target(statement), pending.get(source, [])
    pending.clear()
    if chain and norms and (target == source or not _read_elsewhere(tree, source, statement, norms)):
        yield norms, chain.pop(0)
    while len(chain) > 1:
        first = chain.pop(0)
        if _is_of(first, me):
            yield [first], chain.pop(0)
    if target and chain and _is_of(chain[0], me):
        pending[target] = chain


def _chain(statement: ast.stmt) -> tuple[list[ast.Call], str]:
    """Calls of one argument each, from the innermost to the one whose result a statement assigns or returns, and the
    name that the innermost one reads, or "" where that reads anything else.
    """
    value = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
    found: list[ast.Call] = []
    while isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
        found.insert(0, value)
        value = value.args[0]
    if found and isinstance(found[0].args[0], ast.Starred):
        return [], ""
    return found, value.id if isinstance(value, ast.Name) else ""


def _target(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    (target,) = targets if len(targets) == 1 else (None,)
    return target.id if isinstance(target, ast.Name) else ""


def _is_of(call: ast.Call, me: str) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == me


def _read_elsewhere(tree: ast.AST, name: str, statement: ast.stmt, norms: Iterable[ast.Call]) -> bool:
    """Whether anything but a statement, and what the norms themselves read, may read a name."""
    within = {node for each in (statement, *norms) for node in ast.walk(each)}
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and node not in within
        for node in ast.walk(tree)
    )


def _has_pairs(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module's ``forward`` has a group norm of its own before a SiLU."""
    if not any(_is_group_norm(child) for child in module.children()):
        return False
    forward: Any = innermost(type(module).forward)
    tree = definition(forward) if isinstance(forward, types.FunctionType) else None
    if tree is None or forward.__code__.co_freevars or not forward.__code__.co_argcount:
        return False
    me, found = forward.__code__.co_varnames[0], False
    for norms, act in _pairs(tree, me):
        named = [getattr(module, norm.func.attr, None) for norm in norms]  # type: ignore[attr-defined]
        if any(_is_group_norm(each) for each in named) and _may_be_silu(_meant(module, act.func, me, forward)):
            found = True
    return found


def _meant(module: nn.Module, function: ast.expr, me: str, forward: Any) -> Any:
    """The object that a name or a dotted name in the source of a ``forward`` refers to, such as ``self.act`` or
    ``F.silu``; None if it cannot be found.
    """
    first, *names = ast.unparse(function).split(".") if isinstance(function, ast.Name | ast.Attribute) else [""]
    found = module if first == me else forward.__globals__.get(first)
    for name in names:
        found = getattr(found, name, None)
    return found


def _is_group_norm(module: Any) -> bool:
    return getattr(type(module), "_cute_original", type(module)) is nn.GroupNorm


# --- sequences of modules --------------------------------------------------------------------------------------------


def _in_sequence(self: nn.Sequential, input: Any) -> Any:
    waiting = None
    for module in self:
        if waiting is not None:
            input, waiting = now(module, waiting), None
        elif type(found := later(module, input)) is Waiting:
            waiting = found
        else:
            input = found
    return input if waiting is None else waiting.norm(waiting.x)


def _is_sequence(module: nn.Module, model: nn.Module) -> bool:
    if type(module) is not nn.Sequential or not calls(module, nn.Sequential.forward):
        return False
    return any(_is_group_norm(a) and _may_be_silu(b) for a, b in pairwise(module))


REPLACEMENTS = (Replacement("group_norm", _is_sequence, lambda original: named_as(_in_sequence, original)),)
ACTIVATED = Replacement("group_norm", _has_pairs, _with_calls)
