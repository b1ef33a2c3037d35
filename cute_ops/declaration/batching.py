"""A batch of examples as one call of an op: what ``vmap`` is in both frameworks.

The batch dim becomes one more leading dim, which costs nothing. This needs leading dims of one name on every batched
input and on every output. Otherwise it would mix examples: if an output sums over rows (a weight's gradient), if a
batched input has no rows (a weight per example), if each row depends on all of them (``whole`` names them), or if rows
of other leading dims are batched (each example's ``*m`` would see all examples' ``*p``). Then an op of batches runs
where the declaration has one, else the op once per example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor


class OneCall(NamedTuple):
    """The call that computes all examples.

    Attributes:
        op: what is called: the op, or its op of batches.
        inputs: arrays by name.
        lead: the size of the batch and the leading dims of an example, which the outputs of an op of batches lack; None
            of the op itself.
    """

    op: Op
    inputs: dict[str, Any]
    lead: tuple[Any, ...] | None = None

    def unfolded(self, declared: Tensor, output: Any) -> Any:
        """An output with all leading dims."""
        return output.reshape(*self.lead, *output.shape[2:]) if self.lead and declared.rows else output


def as_one_call(xp: Any, op: Op, arguments: Mapping[str, tuple[Any, bool]], size: Any) -> OneCall | None:
    """All examples as one call; None where each needs one of its own.

    Args:
        xp: has ``broadcast_to``.
        op: the declaration.
        arguments: inputs by name, each with whether it is batched, then in its first dim.
        size: how many examples there are.
    """
    inputs = {name: _Input(op.inputs[name], array, batched) for name, (array, batched) in arguments.items()}
    groups = {i.declared.rows for i in inputs.values() if i.batched}
    groups |= {t.rows for n, t in op.results.items() if (n if n in op.mutates else t.given) in (None, *arguments)}
    if len(groups) == 1 and None not in groups and groups.isdisjoint(op.whole):
        return OneCall(op, _folded(xp, {n: i for n, i in inputs.items() if i.declared.rows in groups}, size, arguments))
    if op.batched is None:
        return None
    lead = _lead(inputs)
    whole = {}
    for name, (declared, array, batched) in inputs.items():
        if declared.rows:  # as one dim
            array = array.reshape(*array.shape[:batched], math.prod(lead), *array.shape[batched + len(lead) :])
        whole[name] = array if batched else xp.broadcast_to(array, (size, *array.shape))
    return OneCall(op.batched, whole, (size, *lead))


class _Input(NamedTuple):
    declared: Tensor
    array: Any
    batched: bool


def _folded(
    xp: Any, inputs: Mapping[str, _Input], size: Any, arguments: Mapping[str, tuple[Any, bool]]
) -> dict[str, Any]:
    """All arguments, of these inputs with the batch as one more leading dim.

    Inputs that broadcast over leading dims broadcast over one more, unless one of them is batched: then all of them get
    all leading dims.
    """
    lead, whole = _lead(inputs), {name: array for name, (array, _) in arguments.items()}
    keep = not any(i.declared.broadcast and i.batched for i in inputs.values())
    for name, (declared, array, batched) in inputs.items():
        if not (declared.broadcast and keep):
            ones = (None,) * (batched + len(lead) + len(declared.dims) - array.ndim)
            shape = size, *lead, *array.shape[array.ndim - len(declared.dims) :]
            whole[name] = xp.broadcast_to(array[(*[slice(None)] * batched, *ones)], shape)
    return whole


def _lead(inputs: Mapping[str, _Input]) -> tuple[Any, ...]:
    """The leading dims of one example."""
    for declared, array, batched in inputs.values():
        if declared.rows and not declared.broadcast:
            return tuple(array.shape[batched : array.ndim - len(declared.dims)])
    return ()
