"""A linear layer with an epilogue: :mod:`cute_ops.ops.gemm.by_call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite import rmsnorm_linear as norm_before
from cute_ops.composite.docstrings import continued
from cute_ops.declaration.op import Op
from cute_ops.ops.expression.broadcast import Fit
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Epilogue
from cute_ops.ops.gemm.gated_dgrad import gated_linear_of
from cute_ops.ops.gemm.halves import APART, PACKED
from cute_ops.ops.gemm.linear import linear as product
from cute_ops_jax.primitive.arrays import checked, spec
from cute_ops_jax.primitive.function import register

Array = jax.Array


@checked
@continued(by_call.DOC)
def linear(
    x: Array, weight: Array, *operands: Array | None, epilogue: Epilogue | None = None, fused: str = "auto",
    packed: bool = False, transposed: bool = False, halves: bool = False, save: str = "pre", **attrs: Any,
) -> Any:  # fmt: skip
    """A product and what happens to it before it is stored: ``out = epilogue(x @ weight.T, *operands)``."""
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    if epilogue is None:
        by_call.without_epilogue(operands, attrs, halves, packed, save)
        op = product.batched if weight.ndim > 2 else None
        return register(op or product)(x, weight.mT if transposed and weight.ndim > 1 else weight, fused)
    layout = by_call.weight_shape(packed, transposed, halves)
    function, given = call_with_epilogue("linear", epilogue, (x, weight, *operands), layout, save, attrs)
    return function(x, weight, *given, fused=fused)


def call_with_epilogue(
    caller: str, epilogue: Epilogue, arrays: Sequence[Any], layout: str, save: str, attrs: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[Array]]:
    """The function of the op of a call of ``caller`` on x, a weight and operands, and the latter as it takes them."""
    given = [None if a is None else jnp.asarray(a) for a in arrays]
    known = tuple(attrs.items())
    fits = by_call.fits(epilogue, given, layout, known, spec, caller)
    batched = given[1] is not None and by_call.is_batch(layout, given[1].ndim)
    op = _OPS[caller](epilogue, tuple(fit and fit.shape for fit in fits), batched, layout, save, known)
    fitted, halves = zip(given[2:], fits, strict=True), APART in layout
    return register(op), [_fitted(a, fit, halves) for a, fit in fitted if a is not None and fit is not None]


@checked
@continued(by_call.GATED_DOC)
def gated_linear(
    x: Array, weight: Array, activation: str = "silu", fused: str = "auto", *, transposed: bool = False,
    halves: bool = False,
) -> Array:  # fmt: skip
    """``out = activation(x @ gate.T) * (x @ up.T)`` with ``gate, up = weight[:n], weight[n:]``."""
    op = gated_linear_of(transposed, jnp.ndim(weight) > 2 + halves, halves)
    out: Array = register(op)(x, weight, activation, fused)
    return out


# By the function that is called, what makes its op.
_OPS: dict[str, Callable[..., Op]] = {"linear": by_call.op_of_call, "rmsnorm_linear": norm_before.op_of_call}


def _fitted(array: Array, fit: Fit, halves: bool) -> Array:
    whole = jnp.broadcast_to(array.reshape(fit.own), fit.sizes)
    if not halves or PACKED not in fit.shape:
        return whole
    return whole.reshape((*whole.shape[:-1], 2, whole.shape[-1] // 2))
