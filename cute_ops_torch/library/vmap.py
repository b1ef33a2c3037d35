"""``torch.vmap``: a batch dim becomes one more leading dim, which costs nothing.

This needs leading dims of one name on every batched input and on every output. Otherwise it would mix examples: if an
output sums over rows (a weight's gradient), if a batched input has no rows (a weight per example), or if rows of other
leading dims are batched (each example's ``*m`` would see all examples' ``*p``). Then an op of batches runs where the
declaration has one, else the op once per example.

An input that the op writes has to be batched where any is: the examples' values for one tensor would be several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_ops.errors import message
from cute_ops.op import Op, Tensor
from cute_ops_torch.library.schema import filler, resolver
from cute_ops_torch.library.tensors import arrays, readable


def vmap_rule(op: Op, overload: Any, define: Callable[[Op], Any]) -> Callable[..., Any]:
    """The rule that ``torch.library.register_vmap`` takes; ``define`` registers an op and returns its overload."""
    fill, arity = filler(op), len(op.inputs)
    declared = list(op.inputs.values())
    resolve = resolver(op)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        args = fill(args)
        dims = [*in_dims, *[None] * (len(args) - len(in_dims))][:arity]
        tensors = [t if d is None else t.movedim(d, 0) for t, d in zip(args[:arity], dims, strict=True)]
        batched = [d is not None for d in dims]
        _refuse_shared(op, tensors, batched)
        gives = [o.given is None or args[list(op.inputs).index(o.given)] is not None for o in op.outputs.values()]
        groups = {t.rows for t, b in zip(declared, batched, strict=True) if b}
        groups |= {o.rows for o, given in zip(op.outputs.values(), gives, strict=True) if given}
        read = [_reader(d) if name not in op.mutates else _same for name, d in op.inputs.items()]
        group = next(iter(groups))
        if len(groups) == 1 and group:
            own = [d.rows == group for d in declared]
            lead = _lead(tensors, declared, batched, own)
            # Inputs that broadcast over leading dims broadcast over one more, unless one of them is batched: then all
            # of them get all leading dims.
            shared = not any(d.broadcast and b for d, b in zip(declared, batched, strict=True))
            whole = [
                _whole(t, d, b, info.batch_size, lead) if t is not None and o and not (d.broadcast and shared) else t
                for t, d, b, o in zip(tensors, declared, batched, own, strict=True)
            ]
            raw = overload(*(take(t) for take, t in zip(read, whole, strict=True)), *args[arity:])
            if not op.outputs:
                return None, None
            outputs = raw if isinstance(raw, tuple) else (raw,)
            real = resolve(whole, outputs)
            out_dims = tuple(0 if o is r else None for o, r in zip(outputs, real, strict=True))
            return (outputs, out_dims) if isinstance(raw, tuple) else (raw, 0)
        if op.batched:
            lead = _lead(tensors, declared, batched, [bool(d.rows) for d in declared])
            matrices = [
                _example_rows(t, d, b, info.batch_size, lead)
                for t, d, b in zip(tensors, declared, batched, strict=True)
            ]
            given = [
                t if name in op.mutates else readable(d, t)
                for (name, d), t in zip(op.batched.inputs.items(), matrices, strict=True)
            ]
            raw = define(op.batched)(*given, *args[arity:])
            if not op.outputs:
                return None, None
            outputs = tuple(
                out.reshape(info.batch_size, *lead, *out.shape[2:]) if d.rows else out
                for d, out in zip(op.outputs.values(), raw if isinstance(raw, tuple) else (raw,), strict=True)
            )
            return (outputs, (0,) * len(outputs)) if isinstance(raw, tuple) else (outputs[0], 0)
        each = examples(info.batch_size, dims, args[:arity])
        found = [overload(*(take(t) for take, t in zip(read, example, strict=True)), *args[arity:]) for example in each]
        if not op.outputs:
            return None, None
        if isinstance(found[0], tuple):
            columns = zip(*found, strict=True)
            return tuple(stacked(info.batch_size, column) for column in columns), (0,) * len(op.outputs)
        return stacked(info.batch_size, found), 0

    return rule


def _refuse_shared(op: Op, tensors: Sequence[Any], batched: Sequence[bool]) -> None:
    given = zip(op.inputs, tensors, batched, strict=True)
    shared = [name for name, t, b in given if t is not None and not b and name in op.mutates]
    if shared and any(batched):
        other = next(name for name, b in zip(op.inputs, batched, strict=True) if b)
        problem = (
            f"vmap: `{shared[0]}` is written but not batched, while `{other}` is: every example would write its own "
            f"values into one tensor; batch `{shared[0]}` too."
        )
        raise ValueError(message(op, problem, arrays(op, tensors)))


def examples(size: int, dims: Sequence[Any], arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments of each of ``size`` examples; ``dims`` are their batch dims, None where not batched. Where there is
    no example one of zeros, which tells the shapes of results; :func:`stacked` drops it.
    """
    count = max(size, 1)
    moved = [a.movedim(d, 0) if isinstance(d, int) else None for a, d in zip(arguments, dims, strict=True)]
    batches = [t if t is None or size else t.new_zeros((1, *t.shape[1:])) for t in moved]
    each = [[a] * count if t is None else t.unbind() for a, t in zip(arguments, batches, strict=True)]
    return list(zip(*each, strict=True))


def stacked(size: int, results: Sequence[torch.Tensor]) -> torch.Tensor:
    """One result of each example of :func:`examples`, batched."""
    return torch.stack(tuple(results))[:size]


def _lead(
    tensors: Sequence[Any], declared: Sequence[Tensor], batched: Sequence[bool], own: Sequence[bool]
) -> tuple[int, ...]:
    """The leading dims of one example, of the tensors that have them of their ``own``."""
    for t, d, b, has in zip(tensors, declared, batched, own, strict=True):
        if t is not None and has and not d.broadcast:
            return tuple(t.shape[b : t.ndim - len(d.dims)])
    return ()


def _whole(tensor: Any, declared: Tensor, batched: bool, size: int, lead: tuple[int, ...]) -> Any:
    """A view with the batch dim and all leading dims."""
    tail = tensor.shape[tensor.ndim - len(declared.dims) :]
    ones = (None,) * (batched + len(lead) + len(tail) - tensor.ndim)
    return tensor[(*[slice(None)] * batched, *ones)].expand(size, *lead, *tail)


def _example_rows(tensor: Any, declared: Tensor, batched: bool, size: int, lead: tuple[int, ...]) -> Any:
    """The tensor of each example with one dim of rows."""
    if declared.rows:
        own = tensor.shape[batched + len(lead) :]
        tensor = tensor.reshape((*([size] if batched else []), math.prod(lead), *own))
    return tensor if batched else tensor.expand(size, *tensor.shape)


def _same(tensor: Any) -> Any:
    return tensor


def _reader(declared: Tensor) -> Callable[[Any], Any]:
    """Takes an input; a copy if batching has left it so that the op cannot."""
    return lambda tensor: None if tensor is None else readable(declared, tensor)
