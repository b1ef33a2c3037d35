"""A function as an op: with shapes that are declared, or by each call's, :mod:`cute_ops.ops.expression.by_call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from cute_ops.composite.public import continued
from cute_ops.ops.expression.broadcast import Fit
from cute_ops.ops.expression.by_call import DOC, ByCall, decorate
from cute_ops_jax.primitive.arrays import unwrapped
from cute_ops_jax.primitive.function import register

Function = Callable[..., Any]
Operand = jax.typing.ArrayLike | None
ARRAYS = (jax.Array, np.ndarray)


@overload
def fused(function: Function, /, *, name: str = ...) -> Function: ...
@overload
def fused(
    *, name: str = ..., operands: Mapping[str, str] | None = ..., **declaration: Any
) -> Callable[[Function], Function]: ...
@continued(DOC)
def fused(
    function: Function | None = None, /, *, name: str = "", operands: Mapping[str, str] | None = None,
    **declaration: Any,
) -> Any:  # fmt: skip
    """Decorates a function of elements or of rows: callers leave out ``xp``.

    @cute_ops_jax.fused
    def gelu_add(xp, x, bias, residual):
        return xp.gelu(x + bias) + residual
    """
    return decorate(function, name, operands, declaration, register, _by_call)


def _by_call(by_call: ByCall) -> Function:
    """The function that callers get."""

    def function(*args: Operand, **kwargs: Any) -> Any:
        operands, attrs = by_call.bind(args, kwargs)
        operands = [_number(unwrapped(a)) for a in operands]
        op, fits = by_call.choose(operands, attrs, ARRAYS)
        each = zip(operands, fits, strict=True)
        given = [(_as_array(a), how) for a, how in each if a is not None and how is not None]
        call: Function = partial(call_fitted, register(op), [how for _, how in given])
        if any(how.expanded and _narrow(a) for a, how in given):
            op, fits = by_call.choose([_widened(a, how) for a, how in zip(operands, fits, strict=True)], attrs, ARRAYS)
            call = summing(call, partial(call_fitted, register(op), [how for how in fits if how is not None]))
        return call(*(a for a, _ in given))

    return function


def call_fitted(function: Function, fits: Sequence[Fit], *operands: Any, wide: bool = False) -> Any:
    """The op's results; ``wide``: operands that are expanded become float32."""
    given = map(_widened, operands, fits) if wide else operands
    return function(*map(_fitted, given, fits))


def summing(call: Function, anew: Function | None = None) -> Function:
    """The op's function with gradients of expanded operands summed in float32 and rounded once. The backward
    calls the op anew on float32 operands, since JAX gives a gradient the dtype of what it is that of; ``anew``: an op
    that takes them where ``call`` does not.
    """

    def backward(operands: Any, cotangents: Any) -> Any:
        def wide(*operands: Any) -> Any:  # outputs may take their dtype from expanded operands
            return jax.tree.map(
                lambda out, given: out.astype(given.dtype), (anew or call)(*operands, wide=True), cotangents
            )

        return jax.vjp(wide, *operands)[1](cotangents)

    function = jax.custom_vjp(call)
    function.defvjp(lambda *operands: (call(*operands), operands), backward)
    return function


def _narrow(a: Any) -> bool:
    """Whether an array holds floats of 16 bits."""
    return a.dtype.itemsize < 4 and jnp.issubdtype(a.dtype, jnp.floating)


def _widened(operand: Any, how: Fit | None) -> Any:
    """The operand, in float32 if it is expanded."""
    expanded = isinstance(operand, ARRAYS) and how is not None and how.expanded
    return operand.astype("float32") if expanded and _narrow(operand) else operand


def _number(operand: Any) -> Any:
    """The operand in float32 if it is a number that jit traces; any other as it is."""
    traced = getattr(operand, "weak_type", False) and operand.shape == () and operand.dtype != bool
    return operand.astype("float32") if traced else operand


def _as_array(operand: Any) -> Any:
    """An operand as an array; a number is float32."""
    return operand if isinstance(operand, ARRAYS) else jnp.float32(operand)


def _fitted(operand: Any, how: Fit) -> Any:
    """An argument of the op."""
    if operand.shape == how.sizes:
        return operand
    return jnp.broadcast_to(jnp.reshape(operand, how.own), how.sizes)
