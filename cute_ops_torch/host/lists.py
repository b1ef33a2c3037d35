"""Calls of an op with lists of tensors, which run the op that is unrolled for so many tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cute_ops.constants import make_room
from cute_ops.declaration import lists
from cute_ops.declaration.op import Op
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
        self._lists = [k for k, tensor in enumerate(op.inputs.values()) if tensor.many]
        self._calls: dict[tuple[int, ...], Call] = {}

    def counts(self, args: Sequence[Any]) -> dict[str, int]:
        """How many tensors the lists of a call have; raises where they are none, or do not fit together."""
        return lists.counts(self._op, dict(zip(self._op.inputs, args, strict=False)))

    def specialize(self, *args: Any) -> Any:
        """Run a call; it returns lists where the op does."""
        args = self._fill(args)
        lengths = tuple([len(args[k]) if type(args[k]) is list else 0 for k in self._lists])
        call = self._calls.get(lengths)
        if call is None:
            call = self._call(self.counts(args))
            if all(lengths):
                make_room(self._calls)
                self._calls[lengths] = call
        return call(args)

    def _call(self, counts: Mapping[str, int]) -> Call:
        """``call(args)`` for so many tensors."""
        op, function = self._op, self._raw(self._op.unrolled(counts))
        lists_out = any(tensor.many for tensor in op.outputs.values())

        def call(args: tuple[Any, ...]) -> Any:
            raw = function(*lists.spread(op.inputs, args))
            if not lists_out:
                return raw
            found = lists.gathered(op.outputs, counts, raw if isinstance(raw, tuple) else (raw,))
            return found[0] if len(found) == 1 else tuple(found)

        return call
