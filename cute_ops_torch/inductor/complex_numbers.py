"""Products of complex numbers, as rotations are written with: ``view_as_real(view_as_complex(x) * freqs)``.

Neutral graphs have no complex values. One is opaque, and its parts are values of their own where they are read: of
``view_as_complex`` the neighbours that it was made of, of a table opaque ones, which :class:`Emitter
<cute_ops_torch.inductor.emit.Emitter>` makes by ``torch.real`` and ``torch.imag``.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ops.fusion.graph import Graph
from cute_ops.fusion.graph import Node as Value
from cute_ops_torch.inductor.front import Front, shape_of

PARTS = ("real", "imag")
_DTYPE, _PAIRS = "complex64", "view_as_complex"


def as_real(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """``view_as_real`` of pairs times a table: both parts, each a value of rows. None of other complex numbers."""
    x = args[0]
    if (x.op, x.attr, x.dtype) != ("opaque", "mul", _DTYPE) or len(x.args) != 2:
        return None
    pairs = next((arg for arg in x.args if _are_pairs(arg) and arg.shape == x.shape), None)
    if pairs is None or any(arg.dtype != _DTYPE for arg in x.args):
        return None
    table = x.args[1] if x.args[0] is pairs else x.args[0]
    graph, shape = front.graph, x.shape
    (a, b), (cos, sin) = _neighbours(graph, pairs), _parts(graph, table)

    def product(one: Value, other: Value) -> Value:
        return graph.primitive("multiply", [one, other], shape, "float32")

    both = (
        graph.primitive("subtract", [product(a, cos), product(b, sin)], shape, "float32"),
        graph.primitive("add", [product(b, cos), product(a, sin)], shape, "float32"),
    )
    return graph.concat([graph.reshape(part, (*shape, 1)) for part in both], len(shape), shape_of(value))


def is_of_complex(table: Value) -> bool:
    """Whether a table of angles is a part of complex numbers."""
    return table.op == "opaque" and table.attr in PARTS


def _are_pairs(x: Value) -> bool:
    return (x.op, x.attr) == ("opaque", _PAIRS) and x.args[0].dtype == "float32"


def _neighbours(graph: Graph, pairs: Value) -> tuple[Value, ...]:
    x = pairs.args[0]
    return tuple(graph.reshape(graph.slice(x, len(x.shape) - 1, k, k + 1), pairs.shape) for k in range(2))


def _parts(graph: Graph, table: Value) -> tuple[Value, ...]:
    return tuple(_part(graph, table, name) for name in PARTS)


def _part(graph: Graph, table: Value, name: str) -> Value:
    known = (user for user in table.users if (user.op, user.attr) == ("opaque", name))
    return next(known, None) or graph.opaque(name, [table], table.shape, "float32")
