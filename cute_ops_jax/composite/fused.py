"""A function as an op: with shapes that are declared, or by each call's, :mod:`cute_ops.ops.fused_by_call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from cute_ops.composite.docstrings import continued
from cute_ops.ops import fused_by_call
from cute_ops.ops.broadcast import Fit
from cute_ops.ops.fused_by_call import ByCall
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
@continued(fused_by_call.DOC)
def fused(
    function: Function | None = None, /, *, name: str = "", operands: Mapping[str, str] | None = None,
    **declaration: Any,
) -> Any:  # fmt: skip
    """Decorates a function of elements or of rows: callers leave out ``xp``.

    @cute_ops_jax.fused
    def gelu_add(xp, x, bias, residual):
        return xp.gelu(x + bias) + residual
    """
    return fused_by_call.decorate(function, name, operands, declaration, register, _by_call)


def _by_call(by_call: ByCall) -> Function:
    """The function that callers get."""

    def function(*args: Operand, **kwargs: Any) -> Any:
        operands, attrs = by_call.bind(args, kwargs)
        operands = [unwrapped(a) for a in operands]
        op, fits = by_call.choose(operands, attrs, ARRAYS)
        given = [_fitted(a, how) for a, how in zip(operands, fits, strict=True) if a is not None and how is not None]
        return register(op)(*given)

    return function


def _fitted(operand: Any, how: Fit) -> Any:
    """An argument of the op."""
    if not isinstance(operand, ARRAYS):
        return jnp.float32(operand)
    if operand.shape == () and getattr(operand, "weak_type", False):  # a number that jit traces
        operand = operand.astype("float32")
    if operand.shape == how.sizes:
        return operand
    return jnp.broadcast_to(jnp.reshape(operand, how.own), how.sizes)
