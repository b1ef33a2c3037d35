"""A batch of examples as one call of an op: what ``vmap`` is in both frameworks.

The batch dim becomes one more leading dim, which costs nothing. This needs leading dims of one name on every batched
input and on every output. Otherwise it would mix examples: if an output sums over rows (a weight's gradient), if a
batched input has no rows (a weight per example), or if rows of other leading dims are batched (each example's ``*m``
would see all examples' ``*p``). Then an op of batches runs where the declaration has one, else the op once per example.
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


def as_one_call(xp: Any, op: Op, given: Mapping[str, tuple[Any, bool]], size: Any) -> OneCall | None:
    """All examples as one call; None where each needs one of its own.

    Args:
        xp: has ``broadcast_to``.
        op: the declaration.
        given: inputs by name, each with whether it is batched, then in its first dim.
        size: how many examples there are.
    """
    inputs = {name: (op.inputs[name], array, batched) for name, (array, batched) in given.items()}
    groups = {declared.rows for declared, _, batched in inputs.values() if batched}
    groups |= {t.rows for n, t in op.results.items() if (n if n in op.mutates else t.given) in (None, *given)}
    folds = len(groups) == 1 and None not in groups
    own = [each for each in inputs.values() if each[0].rows in groups] if folds else [*inputs.values()]
    lead = next((_lead(*each) for each in own if each[0].rows and not each[0].broadcast), ())
    if folds:
        # Inputs that broadcast over leading dims broadcast over one more, unless one of them is batched: then all of
        # them get all leading dims.
        keep = not any(declared.broadcast and batched for declared, _, batched in inputs.values())
        found = {name: array for name, (array, _) in given.items()}
        for name, (declared, array, batched) in inputs.items():
            if declared.rows in groups and not (declared.broadcast and keep):
                ones = (None,) * (batched + len(lead) + len(declared.dims) - array.ndim)
                whole = size, *lead, *array.shape[array.ndim - len(declared.dims) :]
                found[name] = xp.broadcast_to(array[(*[slice(None)] * batched, *ones)], whole)
        return OneCall(op, found)
    if op.batched is None:
        return None
    found = {}
    for name, (declared, array, batched) in inputs.items():
        if declared.rows:  # as one dim
            array = array.reshape(*array.shape[:batched], math.prod(lead), *array.shape[batched + len(lead) :])
        found[name] = array if batched else xp.broadcast_to(array, (size, *array.shape))
    return OneCall(op.batched, found, (size, *lead))


def _lead(declared: Tensor, array: Any, batched: bool) -> tuple[Any, ...]:
    """The leading dims of one example."""
    return tuple(array.shape[batched : array.ndim - len(declared.dims)])
