"""Recognise Hugging Face's modules by the source of their ``forward``, not by the names of their classes.

Other models of the same build (Mistral, Qwen) match too; a future version that computes something else does not. Of a
``forward`` that matches a copy may find other functions under some global names.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import nn

Forward = Callable[..., Any]


class Replacement(NamedTuple):
    """One kind of module that ``patch`` replaces.

    Attributes:
        op: the op that the new ``forward`` runs.
        matches: ``matches(module, model)``: whether a module of the model is of this kind.
        forward: makes the new ``forward`` for a class of modules.
        unused: name of a submodule that the new ``forward`` does not call.
        packed: ``packed(module)``: names of linear layers that read the same input: packed weights make them one
            matrix product.
        apart: ``apart(module)``: why a part of the module runs in a pass of its own, not in the epilogue of a product;
            empty if none does.
    """

    op: str
    matches: Callable[[nn.Module, nn.Module], bool]
    forward: Callable[[type[nn.Module]], Forward]
    unused: str = ""
    packed: Callable[[nn.Module], tuple[str, ...]] = lambda module: ()
    apart: Callable[[nn.Module], str] = lambda module: ""


def by_source(
    op: str, digest: str, forward: Forward, *, also: Callable[[Any], bool] = lambda module: True, unused: str = "",
    packed: tuple[str, ...] = (),
) -> Replacement:  # fmt: skip
    """The replacement of modules whose ``forward`` has this source digest and which ``also`` accepts."""

    def matches(module: nn.Module, model: nn.Module) -> bool:
        return source_digest(type(module).forward) == digest and also(module)

    return Replacement(op, matches, lambda original: forward, unused, lambda module: packed)


@cache
def source_digest(function: object) -> str | None:
    """A digest of a function's parameters and body; None where it has no source.

    Annotations, comments, the docstring and the version of Python do not count.
    """
    tree = definition(function)
    if tree is None:
        return None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    text = "\n".join([ast.unparse(tree.args), *map(ast.unparse, body)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def definition(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function beneath its decorators; None where it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def rebind(forward: Any, **names: Forward) -> Forward:
    """A copy of ``forward`` that finds these functions under these global names, beneath its decorators too."""
    inner, closure = getattr(forward, "__wrapped__", None), forward.__closure__
    if inner is not None:
        rebound = rebind(inner, **names)
        closure = tuple(types.CellType(rebound) if cell.cell_contents is inner else cell for cell in closure)
        names = {}
    # Leave out `__name__`: Dynamo would look names up in the module of that name.
    scope = {k: v for k, v in forward.__globals__.items() if k != "__name__"} | names
    copy = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def can_rebind(forward: Any) -> bool:
    """Whether each decorator of ``forward`` holds what it wraps in its closure, where :func:`rebind` replaces it."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        cells = forward.__closure__ or () if isinstance(forward, types.FunctionType) else ()
        if not any(cell.cell_contents is inner for cell in cells):
            return False
        forward = inner
    return isinstance(forward, types.FunctionType)
