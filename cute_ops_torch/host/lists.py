"""Calls of an op with lists of tensors, which run the op that is unrolled for so many tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cute_ops import lists
from cute_ops.op import Op
from cute_ops_torch.library.schema import filler

Call = Callable[..., Any]


class ListCalls:
    """Takes the place of a fast path: the unrolled ops have theirs.

    Attributes:
        table: empty, since no call is found by the shape of its first input.
    """

    def __init__(self, op: Op, raw: Callable[[Op], Call]) -> None:
        """``raw`` gives the raw function of an unrolled op."""
        self.table: dict[Any, Call] = {}
        self._op, self._raw, self._fill = op, raw, filler(op)
        self._functions: dict[Op, Call] = {}

    def counts(self, args: Sequence[Any]) -> dict[str, int]:
        """How many tensors the lists of a call have; raises where they are none, or do not fit together."""
        return lists.counts(self._op, dict(zip(self._op.inputs, args, strict=False)))

    def specialize(self, *args: Any) -> Any:
        """Run a call; it returns lists where the op does."""
        op, args = self._op, self._fill(args)
        counts = self.counts(args)
        one = op.unrolled(counts)
        function = self._functions.get(one)
        if function is None:
            function = self._functions[one] = self._raw(one)
        raw = function(*lists.spread(op.inputs, args))
        if not op.outputs:
            return None
        found = lists.gathered(op.outputs, counts, raw if isinstance(raw, tuple) else (raw,))
        return found[0] if len(found) == 1 else tuple(found)
