"""Make ops of found expressions anew: code in Inductor's caches calls them in processes that have found nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cute_ops.declaration.op import Op
from cute_ops.ops.expression.call import op_of
from cute_ops.ops.gemm import by_call

_sources: dict[str, str] = {}


def linear(epilogue: str, shapes: Sequence[str], layout: str) -> Op:
    """The op of a product with an epilogue."""
    op = by_call.op_of_call(epilogue, tuple(shapes), False, layout, "pre")
    return _noted(op, f"linear({epilogue!r}, {tuple(shapes)!r}, {layout!r})")


def fused(expression: str, operands: Mapping[str, str]) -> Op:
    """The op of an expression of rows."""
    op = op_of(expression, dict(operands), name="found")
    return _noted(op, f"fused({expression!r}, {dict(operands)!r})")


def registering(op: Op) -> str:
    """The Python statement that registers an op in another process; empty for one that is registered there anyway."""
    call = _sources.get(op.name, "")
    return f"import {__name__} as recipes; recipes.register(recipes.{call})" if call else ""


def register(op: Op) -> None:
    """Register an op with torch and its lowering with Inductor."""
    from cute_ops_torch.registry import define  # which imports lowerings, which import this module

    define(op).lower()


def _noted(op: Op, call: str) -> Op:
    _sources[op.name] = call
    return op
