"""A linear layer with an epilogue: :mod:`cute_ops.ops.gemm.by_call`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite.docstrings import continued
from cute_ops.ops.broadcast import Fit
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Epilogue
from cute_ops.ops.gemm.linear import linear as product
from cute_ops_jax.primitive.arrays import spec
from cute_ops_jax.primitive.function import register

Array = jax.Array


@continued(by_call.DOC)
def linear(
    x: Array, weight: Array, *operands: Array | None, epilogue: Epilogue | None = None, fused: str = "auto",
    packed: bool = False, transposed: bool = False, save: str = "pre", **attrs: Any,
) -> Any:  # fmt: skip
    """A product and what happens to it before it is stored: ``out = epilogue(x @ weight.T, *operands)``."""
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    given = [None if a is None else jnp.asarray(a) for a in operands]
    batched = weight.ndim > 2
    if epilogue is None:
        by_call.without_epilogue(operands, attrs)
        return register((batched and product.batched) or product)(x, weight.mT if transposed else weight, fused)
    fits = by_call.fits(epilogue, (x, weight, *given), packed, transposed, spec)
    shapes = tuple(fit and fit.shape for fit in fits)
    make = by_call.op_of_batch if batched else by_call.op_of
    op = make(epilogue, shapes, by_call.weight_shape(packed, transposed), save, tuple(attrs.items()))
    fitted = [_fitted(a, fit) for a, fit in zip(given, fits, strict=True) if a is not None and fit is not None]
    return register(op)(x, weight, *fitted, fused=fused)


def _fitted(array: Array, fit: Fit) -> Array:
    return jnp.broadcast_to(array.reshape(fit.own), fit.sizes)
