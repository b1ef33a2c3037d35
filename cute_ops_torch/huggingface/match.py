"""Modules that ``patch`` replaces, recognised by the source of their ``forward``, not by the names of their classes.

Other models of the same build (Mistral, Qwen) match too; a future version that computes something else does not. A new
``forward`` runs beneath the decorators of the one that it replaces, whatever they do.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache, update_wrapper
from typing import Any, NamedTuple

from torch import nn

from cute_ops_torch.huggingface.source import source_digest

Forward = Callable[..., Any]
# Wrappers, by module and name, that return what they wrap returns, for the same arguments by other names.
_HAND_ON = {
    ("transformers.utils.deprecation", "wrapped_func"),  # of `deprecate_kwarg`
    ("transformers.modeling_layers", "forward_with_checkpointing"),  # if a layer is not checkpointed
}


class Replacement(NamedTuple):
    """One kind of module that ``patch`` replaces.

    Attributes:
        op: the op that the new ``forward`` runs.
        matches: ``matches(module, model)``: whether a module of the model is of this kind.
        forward: makes the new ``forward`` from the one beneath the decorators of the original.
        unused: name of a submodule that the new ``forward`` does not call.
        packed: ``packed(module)``: names of linear layers that read the same input: packed weights make them one
            matrix product.
        norm: ``norm(module)``: what a norm computes, if the module is one.
        apart: ``apart(module)``: why a part of the module runs in a pass of its own, not in the epilogue of a product;
            empty if none does.
        whole: the new ``forward`` takes the place of the original's decorators, too.
    """

    op: str
    matches: Callable[[nn.Module, nn.Module], bool]
    forward: Callable[[Any], Forward]
    unused: str = ""
    packed: Callable[[nn.Module], tuple[str, ...]] = lambda module: ()
    apart: Callable[[nn.Module], str] = lambda module: ""
    norm: Callable[[Any], Any] | None = None
    whole: bool = False


def by_source(
    op: str, digest: str, forward: Forward, *, also: Callable[[Any], bool] = lambda module: True, unused: str = "",
    packed: tuple[str, ...] = (), norm: Callable[[Any], Any] | None = None,
) -> Replacement:  # fmt: skip
    """The replacement of modules whose ``forward`` has this source digest and which ``also`` accepts."""

    def matches(module: nn.Module, model: nn.Module) -> bool:
        return source_digest(type(module).forward) == digest and also(module)

    return Replacement(
        op, matches, lambda original: named_as(forward, original), unused, lambda module: packed, norm=norm
    )


def innermost(forward: Any) -> Any:
    """The function beneath the decorators of ``forward``; None where :func:`rewrap` cannot replace it."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        if not any(contents is inner for contents in _contents(forward)):
            return None
        forward = inner
    return forward if isinstance(forward, types.FunctionType) else None


def rewrap(forward: Any, function: Forward) -> Forward:
    """``function`` beneath copies of the decorators of ``forward``."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        return function
    wrapped = rewrap(inner, function)
    cells = zip(forward.__closure__, _contents(forward), strict=True)
    closure = tuple(types.CellType(wrapped) if contents is inner else cell for cell, contents in cells)
    copy = update_wrapper(_copy(forward, forward.__code__, forward.__globals__, closure), forward)
    vars(copy)["__wrapped__"] = wrapped
    return copy


def rebind(function: Any, **names: Forward) -> Forward:
    """A copy of a function that finds these functions under these global names.

    Its code is its own: Dynamo keeps what it compiled by code, and looks for it among the globals it compiled with.
    """
    # Leave out `__name__`: Dynamo would look names up in the module of that name.
    scope = {k: v for k, v in function.__globals__.items() if k != "__name__"} | names
    return with_own_code(_copy(function, function.__code__, scope, function.__closure__))


@cache
def hands_on(forward: Any) -> bool:
    """Whether all decorators of ``forward`` are known to return what it returns, for arguments as it wants them."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        home, code = getattr(forward, "__globals__", {}).get("__name__", ""), getattr(forward, "__code__", None)
        if not home.startswith("cute_ops_torch.") and (home, getattr(code, "co_name", "")) not in _HAND_ON:
            return False
        forward = inner
    return True


@cache
def named_as(function: Any, original: Any) -> Forward:
    """``function`` whose arguments may be given by the names that they have in ``original``."""
    code, count = function.__code__, function.__code__.co_argcount
    names = original.__code__.co_varnames[:count]
    if names == code.co_varnames[:count]:
        return function  # type: ignore[no-any-return]
    renamed = code.replace(co_varnames=(*names, *(f"_{name}" for name in code.co_varnames[count:])))
    copy = _copy(function, renamed, function.__globals__, function.__closure__)
    vars(copy)["__wrapped__"] = function
    return copy


def with_own_code(function: Any) -> Forward:
    """``function`` with a code object of its own. All functions that one ``def`` makes share theirs, and after eight
    compiled forms of a code object Dynamo runs it as it is: a model has more classes and masks than that.
    """
    function.__code__ = function.__code__.replace()
    return function  # type: ignore[no-any-return]


def _copy(function: Any, code: types.CodeType, scope: dict[str, Any], closure: Any) -> Forward:
    copy = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _contents(function: Any) -> list[object]:
    """The contents of a function's closure, a new object for each cell that is empty."""
    found: list[object] = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(object())
    return found
