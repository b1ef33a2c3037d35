"""Gathers of whole rows of a table: our ``embedding``, which writes the table's gradient in one pass.

XLA adds the gradient's rows to the table one by one, and waits where tokens have the same class, as the frequent words
of a text do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from cute_ops.fusion.graph import FLOATS
from cute_ops_jax._compat import JaxprEqn
from cute_ops_jax.composite.embedding import embedding

# Gives an equation's outputs for its inputs.
Lookup = Callable[[Sequence[Any]], list[Any]]


def lookup_of(equation: JaxprEqn) -> Lookup | None:
    """The replacement of an equation that looks up several rows of a table; None for any other."""
    if equation.primitive.name != "gather":
        return None
    table, index, out = (cast(Any, v.aval) for v in (*equation.invars, *equation.outvars))
    params = equation.params
    if len(table.shape) != 2 or str(table.dtype) not in FLOATS or str(index.dtype) not in ("int32", "int64"):
        return None
    whole = tuple(params["slice_sizes"]) == (1, table.shape[1]) and len(index.shape) > 1 and 0 not in table.shape
    if not (whole and _reads_rows(params["dimension_numbers"], params["mode"].name, len(out.shape))):
        return None
    if params["mode"].name == "FILL_OR_DROP" and not (params["fill_value"] is None or np.isnan(params["fill_value"])):
        return None
    clips, classes = params["mode"].name == "CLIP", table.shape[0]

    def run(inputs: Sequence[Any]) -> list[Any]:
        weight, at = inputs
        at = jnp.asarray(at)[..., 0]
        # A negative index counts from the end in our op. Here it is none.
        at = jnp.clip(at, 0, classes - 1) if clips else jnp.where(at < 0, classes, at)
        return [jnp.reshape(embedding(at, weight), out.shape)]

    return run


def _reads_rows(dims: Any, mode: str, rank: int) -> bool:
    """Whether each index is that of a row, whose columns are the result's last dim. In a gather that clips, a second
    number, the first column, is always 0.
    """
    if tuple(dims.operand_batching_dims) or tuple(dims.start_indices_batching_dims):
        return False
    start, collapsed, offset = map(tuple, (dims.start_index_map, dims.collapsed_slice_dims, dims.offset_dims))
    if (start, collapsed) == ((0,), (0,)) or ((start, collapsed) == ((0, 1), (0,)) and mode == "CLIP"):
        return offset == (rank - 1,)
    return (start == (0,) or (start == (0, 1) and mode == "CLIP")) and not collapsed and offset == (rank - 2, rank - 1)
