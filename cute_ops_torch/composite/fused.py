"""A function as an op: with shapes that are declared, or by each call's, :mod:`cute_ops.ops.fused_by_call`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, overload

import torch

from cute_ops.composite.docstrings import continued
from cute_ops.constants import make_room
from cute_ops.ops import fused_by_call
from cute_ops.ops.broadcast import Fit
from cute_ops.ops.fused_by_call import Attrs, ByCall, kinds, there
from cute_ops_torch.composite.constant import constant, guard, number, traced
from cute_ops_torch.registry import define, register

Function = Callable[..., Any]
Operand = torch.Tensor | float | None
Fits = tuple[Fit | None, ...]
# The function of a call's op, and how its operands meet the result; None where they are passed as they are.
Chosen = tuple[Function, Fits | None]


@overload
def fused(function: Function, /, *, namespace: str = ..., name: str = ...) -> Function: ...
@overload
def fused(
    *, namespace: str = ..., name: str = ..., operands: Mapping[str, str] | None = ..., **declaration: Any
) -> Callable[[Function], Function]: ...
@continued(fused_by_call.DOC)
def fused(
    function: Function | None = None, /, *, namespace: str = "cute", name: str = "",
    operands: Mapping[str, str] | None = None, **declaration: Any,
) -> Any:  # fmt: skip
    """Decorates a function of elements or of rows: callers leave out ``xp``.

        @cute_ops_torch.fused
        def gelu_add(xp, x, bias, residual):
            return xp.gelu(x + bias) + residual

    Ops are in ``torch.ops.cute``, or the other ``namespace`` that is given.
    """
    return fused_by_call.decorate(
        function, name, operands, declaration, lambda op: register(op, namespace), lambda of: _by_call(of, namespace)
    )


def _by_call(by_call: ByCall, namespace: str) -> Function:
    """The function that callers get."""
    known: dict[Hashable, Chosen] = {}
    while_traced = traced(by_call.op, namespace)

    @constant
    def halves(there: str, attrs: Attrs) -> str:
        return by_call.halves(there, attrs)

    def choose(operands: Sequence[Operand], attrs: Attrs) -> Chosen:
        op, fits = by_call.choose(operands, attrs, torch.Tensor)
        return define(op, namespace).function, None if _meet(operands, fits) else fits

    def function(*args: Operand, **kwargs: Any) -> Any:
        operands, attrs = by_call.bind(args, kwargs)
        fits: Fits | None
        if torch.compiler.is_dynamo_compiling():
            guard(by_call.function)
            attrs = tuple((name, number(value) if isinstance(value, int | float) else value) for name, value in attrs)
            shapes = by_call.shapes(operands, torch.Tensor)
            fits = by_call.fits(shapes, halves(there(shapes), attrs))
            run = while_traced(kinds(fits), attrs)
        else:
            given = tuple([t.shape if isinstance(t, torch.Tensor) else type(t) for t in operands])
            key = by_call.key(given, attrs)
            try:
                run, fits = known[key]
            except KeyError:
                run, fits = choose(operands, attrs)
                if key and key == by_call.key(given, attrs):
                    make_room(known)
                    known[key] = run, fits
            except TypeError:  # a symbolic shape has no hash
                run, fits = choose(operands, attrs)
        return run(*(operands if fits is None else _fitted(operands, fits)))

    return function


def _meet(operands: Sequence[Operand], fits: Fits) -> bool:
    """Whether all operands are passed as they are."""
    return all(
        isinstance(t, torch.Tensor) and how is not None and t.shape == how.sizes
        for t, how in zip(operands, fits, strict=True)
    )


def _fitted(operands: Sequence[Operand], fits: Fits) -> list[torch.Tensor]:
    """The op's arguments."""
    like = next(t for t in operands if isinstance(t, torch.Tensor))
    given = []
    for t, how in zip(operands, fits, strict=True):
        if t is None or how is None:
            continue
        if not isinstance(t, torch.Tensor):
            t = like.new_full((), t, dtype=torch.float32)
        elif t.shape != how.sizes:
            t = t.reshape(how.own).expand(how.sizes)
        given.append(t)
    return given
