"""A function as an op: with shapes that are declared, or by each call's, :mod:`cute_ops.ops.expression.by_call`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, overload

import torch

from cute_ops.composite.public import continued
from cute_ops.constants import make_room
from cute_ops.errors import shown
from cute_ops.ops.expression.broadcast import TILES, Fit
from cute_ops.ops.expression.by_call import DOC, ByCall, decorate, dtype_of, kinds, presence
from cute_ops.ops.expression.call import Attrs, key_of
from cute_ops_torch.composite.constant import attribute, constant, guard, traced
from cute_ops_torch.library.nodes import tracked
from cute_ops_torch.registry import define, register

Function = Callable[..., Any]
Operand = torch.Tensor | float | None
Fits = tuple[Fit | None, ...]
# The function of a call's op, and how its operands meet the result, None where they are passed as they are.
Chosen = tuple[Function, Fits | None]


@overload
def fused(function: Function, /, *, namespace: str = ..., name: str = ...) -> Function: ...
@overload
def fused(
    *, namespace: str = ..., name: str = ..., operands: Mapping[str, str] | None = ..., **declaration: Any
) -> Callable[[Function], Function]: ...
@continued(DOC)
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
    if torch.compiler.is_dynamo_compiling():
        raise TypeError("cute_ops_torch.fused: call it outside of what torch.compile compiles, once for each function.")
    return decorate(
        function, name, operands, declaration, lambda op: register(op, namespace), lambda of: _by_call(of, namespace)
    )


def _by_call(by_call: ByCall, namespace: str) -> Function:
    """The function that callers get."""
    known: dict[Hashable, Chosen] = {}
    while_traced = traced(by_call.op, namespace)

    @constant
    def halves(presence: str, attrs: Attrs) -> str:
        return by_call.halves(presence, attrs)

    def choose(operands: Sequence[Operand], attrs: Attrs) -> Chosen:
        op, fits = by_call.choose(operands, attrs, torch.Tensor)
        return define(op, namespace).function, None if _meet(operands, fits) else fits

    def anew(given: tuple[Any, ...], key: Hashable, operands: Sequence[Operand], attrs: Attrs) -> Chosen:
        chosen = choose(operands, attrs)
        if key and key == key_of(by_call.function, attrs, given):  # nothing has changed meanwhile
            make_room(known)
            known[key] = chosen
        return chosen

    def function(*args: Operand, **kwargs: Any) -> Any:
        operands, attrs = by_call.bind(args, kwargs)
        fits: Fits | None
        if torch.compiler.is_dynamo_compiling():
            guard(by_call.function)
            attrs = tuple((name, attribute(name, value)) for name, value in attrs)
            shapes = by_call.shapes(operands, torch.Tensor)
            dtypes = [dtype_of(t) if isinstance(t, torch.Tensor) else "" for t in operands]
            fits = by_call.fits(shapes, halves(presence(shapes, dtypes), attrs), dtypes)
            run = while_traced(kinds(fits), attrs)
        else:
            # Bools, whole numbers and tiles of several dtypes have ops of their own.
            given = tuple([(t.shape, t.dtype) if isinstance(t, torch.Tensor) else type(t) for t in operands])
            key = key_of(by_call.function, attrs, given)
            try:
                run, fits = known[key]
            except KeyError:
                run, fits = anew(given, key, operands, attrs)
            except TypeError:  # a symbolic shape has no hash
                run, fits = choose(operands, attrs)
        return run(*(operands if fits is None else _fitted(operands, fits, by_call.name)))

    return function


def _meet(operands: Sequence[Operand], fits: Fits) -> bool:
    """Whether all operands are passed as they are."""
    return all(
        isinstance(t, torch.Tensor) and how is not None and t.shape == how.sizes
        for t, how in zip(operands, fits, strict=True)
    )


def _fitted(operands: Sequence[Operand], fits: Fits, called: str) -> list[torch.Tensor]:
    """The op's arguments, in a call of a function of this name."""
    like = next(t for t in operands if isinstance(t, torch.Tensor))
    given = []
    for t, how in zip(operands, fits, strict=True):
        if t is None or how is None:
            continue
        if not isinstance(t, torch.Tensor):
            try:
                t = like.new_full((), t, dtype=torch.float32)
            except OverflowError:
                raise ValueError(f"cute.{called}: an operand is {shown(t)}, expected one of 64 bits.") from None
        elif t.shape != how.sizes:
            t = expanded(t, how)
        given.append(t)
    return given


def expanded(t: torch.Tensor, how: Fit) -> torch.Tensor:
    """An operand, expanded to the sizes that the op takes. One of 16 bits whose gradient is wanted, which is a sum over
    what it is expanded along, becomes float32 first: so its terms are not rounded, and the sum is rounded once. Not so
    if outputs take their dtype from it, or the op takes no other.
    """
    free = how.shape not in TILES and not how.shape.startswith(dtype_of(t))
    if how.expanded and free and t.dtype.itemsize < 4 and torch.is_grad_enabled() and tracked(t):
        t = t.float()
    return t.reshape(how.own).expand(how.sizes)
