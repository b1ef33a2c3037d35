"""The bytes that a call moves, and the same call with another number of rows."""

from __future__ import annotations

import math

from cute_ops.declaration.binding import Binding, bind, own_lead
from cute_ops.declaration.shapes import ITEMSIZE, Array


def bytes_moved(binding: Binding) -> int:
    """The least bytes that a call reads and writes, as the op declares them or every input and output once."""
    if binding.op.bytes is not None:
        return binding.op.bytes(sizes(binding), binding.attrs)
    read = [a for n, a in binding.inputs.items() if not binding.op.inputs[n].unread]
    return sum(math.prod(a.shape) * ITEMSIZE[a.dtype] for a in (*read, *binding.outputs.values()) if a is not None)


def sizes(binding: Binding) -> dict[str, int]:
    """A call's sizes by name, of leading dims their product."""
    return {name: math.prod(size) if isinstance(size, tuple) else size for name, size in binding.dims.items()}


def flops(binding: Binding) -> int | None:
    """The operations of a call; None if the op does not declare them."""
    return None if binding.op.flops is None else binding.op.flops(sizes(binding), binding.attrs)


def lead_of(binding: Binding, rows: int) -> tuple[int, ...]:
    """Leading dims of a call, as many as it has, for this number of rows."""
    lead = binding.dims.get(binding.leading, ())
    return (*(1,) * (len(lead) - 1), rows) if lead else ()


def resized(binding: Binding, rows: int) -> Binding:
    """A call with another number of rows."""
    op, lead, given = binding.op, lead_of(binding, rows), {}
    for name, tensor in op.inputs.items():
        array = binding.inputs[name]
        if array is not None:
            whole = lead if tensor.rows == binding.leading else binding.dims.get(tensor.rows or "", ())
            own = len(own_lead(tensor, array)) if tensor.broadcast else len(whole)
            tail = array.shape[len(array.shape) - len(tensor.dims) :]
            given[name] = Array((*whole[len(whole) - own :], *tail), array.dtype)
    return bind(op, given, binding.attrs)
