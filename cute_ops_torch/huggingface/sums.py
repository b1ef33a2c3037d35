"""Residual adds and the norms that read their sums, one op each, wherever in a model the two are.

Each ``a + b`` in the ``forward`` of a module with norms becomes a call. If that ``forward`` passes the sum to a norm of
the module, the call computes it, too, and attaches it to the sum (:mod:`cute_ops_torch.huggingface.residual_norm`),
from where the norm takes it. Which norm reads a sum that leaves the module is learned in the first forward: a norm
that we run finds on its input which add has made it. An add whose sum no norm has read is an add.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from cute_ops_torch.huggingface import meaning, norm, residual_norm, traced
from cute_ops_torch.huggingface.bypass import is_plain, takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost
from cute_ops_torch.huggingface.source import copied, definition
from cute_ops_torch.huggingface.statements import compiled

Tensor = torch.Tensor
_ADD = "_cute_add"


def add(module: nn.Module, place: tuple[int, tuple[str, ...]], a: Any, b: Any) -> Any:
    """``a + b``, with the norm that reads it attached where that is known.

    Args:
        place: the number of the add in the ``forward`` of ``module``, and the names of modules to which that passes the
            sum.
    """
    if not _are_streams(a, b):
        return a + b
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))  # a stream that a convolution began
    if not takes(a, b):
        return a + b
    number, within = place
    children = [module._modules.get(name) for name in within]
    norms = [each for each in children if residual_norm.norm_of(each) is not None]
    # Which of several norms of the module reads a sum depends on the call: it is learned as that of a sum that leaves.
    leaves = (not within or len(norms) > 1) and _goes_on(module, number)
    if len(norms) != 1:
        norms = [traced.reader_of(module, number)] if leaves else []
    reader = norms[0] if norms else None
    made = None if reader is None else residual_norm.norm_of(reader)
    total = a + b if made is None or not made.fits(a) else residual_norm.add(a, b, reader)
    if leaves:
        residual_norm.sign(total, module, number)
    return total


def _are_streams(a: Any, b: Any) -> bool:
    """Whether both are plain tensors of rows, alike, and nothing but autograd sees what is done with them."""
    if type(a) is not Tensor or type(b) is not Tensor or not torch.is_grad_enabled() or not is_plain(a):
        return False
    alike = a.dtype == b.dtype and a.shape == b.shape and a.ndim > 1
    return alike and not torch.is_autocast_enabled(a.device.type)


def _goes_on(module: nn.Module, number: int) -> bool:
    """Whether what runs now is a model that keeps its sums to itself, and is neither run again for a gradient nor by
    one, as parts of a model by a checkpoint: the second forward of a part runs without the next one. A trace goes on
    where the next one is in the same graph.
    """
    if torch.compiler.is_dynamo_compiling():
        return traced.goes_on(module, number)
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return traced.keeps_sums() and hooks is None and torch._C._current_graph_task_id() == -1


def _with_calls(op: str, original: Any) -> Forward:
    """The ``forward`` with calls in the place of its adds."""
    tree = copied(definition(original))
    assert tree is not None  # it has adds
    me = original.__code__.co_varnames[0]
    return compiled(_Calls(me, _Flow(tree, me).found).visit(tree), original, {_ADD: add})


class _Calls(ast.NodeTransformer):
    """Puts a call in the place of each add."""

    def __init__(self, me: str, within: dict[ast.BinOp, list[str]]) -> None:
        self._me, self._within, self._count = me, within, 0

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        names = [ast.Constant(name) for name in dict.fromkeys(self._within.get(node, ()))]
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add):
            return node
        place = ast.Tuple([ast.Constant(self._count), ast.Tuple([*names], ast.Load())], ast.Load())
        self._count += 1
        call = ast.Call(ast.Name(_ADD, ast.Load()), [ast.Name(self._me, ast.Load()), place, node.left, node.right], [])
        for each in (call, call.func, *call.args[:2], *place.elts, *names):
            ast.copy_location(each, node)
        return call


class _Flow:
    """Which sums a ``forward`` passes to its modules, at once or by a name, and the names of these modules. Sums that
    are changed in place, ``x += y``, are left out: a norm that came with them would be of other numbers.
    """

    def __init__(self, tree: ast.FunctionDef, me: str) -> None:
        self._me, self._changed = me, set[ast.BinOp]()
        self.found: dict[ast.BinOp, list[str]] = {}
        self._block(tree.body, {})
        for each in self._changed:
            self.found.pop(each, None)

    def _block(self, statements: Iterable[ast.stmt], named: dict[str, set[ast.BinOp]]) -> None:
        """Follows statements one by one; ``named`` has the sums that a name may stand for."""
        for statement in statements:
            blocks = [getattr(statement, field, ()) for field in ("body", "orelse", "finalbody")]
            if not any(blocks):
                self._simple(statement, named)
                continue
            after = [dict(named) for _ in blocks]
            for block, known in zip(blocks, after, strict=True):
                self._block(block, known)
            for name in {name for known in after for name in known}:
                named[name] = {each for known in after for each in known.get(name, ())}

    def _simple(self, statement: ast.stmt, named: dict[str, set[ast.BinOp]]) -> None:
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            owner, _, name = ast.unparse(call.func).partition(".")
            if owner == self._me and name.isidentifier():
                for each in {sum_ for argument in call.args for sum_ in _sums(argument, named)}:
                    self.found.setdefault(each, []).append(name)
        for name in _changed(statement):
            self._changed |= named.get(name, set())
        if isinstance(statement, ast.Assign):
            given = _sums(statement.value, named)
            for node in (each for target in statement.targets for each in ast.walk(target)):
                if isinstance(node, ast.Name):
                    named[node.id] = given


def _changed(statement: ast.stmt) -> Iterator[str]:
    """The names whose tensors a statement writes in place: ``x += y``, ``x[i] = y``, ``x.mul_(y)``, and
    ``f(x, inplace=i)`` whatever ``i`` is.
    """
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign):
            yield from _names(node.target)
        part = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        method = isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.endswith("__")
        if part or method:
            yield from _names(node)
        if isinstance(node, ast.Call) and any(each.arg == "inplace" for each in node.keywords):
            yield from (name for argument in node.args[:1] for name in _names(argument))


def _names(value: Any) -> Iterator[str]:
    """The name that an expression, or what it is a part of, is."""
    while isinstance(value, ast.Subscript | ast.Attribute):
        value = value.value
    if isinstance(value, ast.Name):
        yield value.id


def _sums(value: ast.expr, named: Mapping[str, set[ast.BinOp]]) -> set[ast.BinOp]:
    """The adds that an expression may be."""
    if isinstance(value, ast.Name):
        return named.get(value.id, set())
    return {value} if isinstance(value, ast.BinOp) else set()


@cache
def _adds(forward: Any) -> bool:
    """Whether a ``forward`` has adds, and refers to nothing but its arguments and globals."""
    tree = definition(forward) if forward is not None else None
    if tree is None or forward.__code__.co_freevars:
        return False
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) for node in ast.walk(tree))


def _is_around(op: str, module: nn.Module, model: nn.Module) -> bool:
    """Whether a module adds, and has a norm of its own that runs as ``op``. A stack of layers adds positions only."""
    if any(isinstance(child, nn.ModuleList) for child in module.children()):
        return False
    return _adds(innermost(type(module).forward)) and any(_runs(child, model) == op for child in module.children())


def _runs(module: nn.Module, model: nn.Module) -> str:
    """The op of a norm; empty of any other module."""
    if [*module.children()] or any(p.ndim > 1 for p in module.parameters()):
        return ""
    original = getattr(type(module), "_cute_original", None)
    if original is not None:  # by an earlier call
        made = residual_norm.norm_of(module)
        return made.op if made else ""
    found = next((each for each in norm.REPLACEMENTS if each.matches(module, model)), None)
    found = found or meaning.replacement_of(module)
    return found.op if found is not None and found.norm is not None else ""


SUMS = tuple(
    Replacement(f"add_{op}", partial(_is_around, op), partial(_with_calls, op)) for op in ("rmsnorm", "layernorm")
)
