"""Ops of expressions that were found in graphs, made anew in processes that have not seen these graphs.

A recipe is the Python call that makes such an op. Code in Inductor's caches runs it and registers the op. What
AOTInductor packages runs in C++, too: it calls the op ``by_recipe``, which makes the other op in its first call.
Processes that measure configs, manifests and bundles find an op by its place, an attribute of this module whose name
holds the recipe.
"""

from __future__ import annotations

import ast
import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from cute_ops.declaration.op import Op
from cute_ops.fusion import changed_scores
from cute_ops.ops.attention.mods import Own
from cute_ops.ops.expression.call import op_of
from cute_ops.ops.gemm import by_call
from cute_ops_torch.library.known_recipes import note
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.registry import define

_BEFORE = "_by_"  # stands before the recipe in an attribute's name


def linear(epilogue: str, shapes: Sequence[str], layout: str) -> Op:
    """The op of a product with an epilogue."""
    op = by_call.op_of_call(epilogue, tuple(shapes), False, layout, "pre")
    return _noted(op, f"linear({epilogue!r}, {tuple(shapes)!r}, {layout!r})")


def fused(expression: str, operands: Mapping[str, str]) -> Op:
    """The op of an expression of rows."""
    op = op_of(expression, dict(operands), name="found")
    return _noted(op, f"fused({expression!r}, {dict(operands)!r})")


def attention(score: str, captured: Sequence[tuple[str, str, str]]) -> Op:
    """The op of an attention whose scores an expression changes; ``captured`` are the arrays that this reads."""
    op = changed_scores.op_of(Own(score, "", tuple(captured)))
    return _noted(op, f"attention({score!r}, {tuple(captured)!r})")


def register(op: Op) -> None:
    """Register an op with torch and its lowering with Inductor."""
    define(op).lower()


_MAKERS: dict[str, Callable[..., Op]] = {"linear": linear, "fused": fused, "attention": attention}


@cache
def op_by(recipe: str) -> Op:
    """The op of a recipe.

    Raises:
        ValueError: the text is none.
    """
    try:
        call = ast.parse(recipe, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords:
            return _MAKERS[call.func.id](*map(ast.literal_eval, call.args))
    except (SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cute.by_recipe: {recipe!r} makes no op: {error}") from error
    raise ValueError(f"cute.by_recipe: {recipe!r} makes no op")


def __getattr__(name: str) -> Op:
    """The op of an attribute, made anew in a process that has not found it."""
    *_, letters = name.rpartition(_BEFORE)
    try:
        return op_by(zlib.decompress(base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))).decode())
    except (ValueError, zlib.error) as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error


def _noted(op: Op, recipe: str) -> Op:
    if note(op, recipe):
        letters = base64.b32encode(zlib.compress(recipe.encode())).decode().rstrip("=").lower()
        globals()[f"{op.name}{_BEFORE}{letters}"] = op
    return op


def _by_recipe(recipe: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    op = op_by(recipe)
    made: Any = define(op).overload(*tensors, *op.attrs.values())
    return list(made) if isinstance(made, tuple) else [made]


_library = torch.library.Library("cute", "FRAGMENT")
_library.define(
    "by_recipe(str recipe, Tensor[] tensors) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.impl("by_recipe", _by_recipe, "CompositeExplicitAutograd")
register_fake(_library, "by_recipe", _by_recipe)
