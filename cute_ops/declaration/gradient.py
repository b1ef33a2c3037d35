"""Which ops compute the gradient of an op, without the outputs that are not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from functools import partial, update_wrapper
from typing import Any, Self, TypeVar

from cute_ops.declaration.fields import Declaration

D = TypeVar("D", bound=Declaration)
# Ops that follow from others, by the other op and how they follow from it; each is declared on first use.
_derived: dict[tuple[Declaration, str | tuple[str | int, ...]], Any] = {}


def once(op: D, how: str | tuple[str | int, ...], make: Callable[[], D]) -> D:
    """An op that follows from another one, the same object every time."""
    # Of several threads the first one's counts.
    op_of: D | None = _derived.get((op, how))
    return op_of or _derived.setdefault((op, how), make())


class Differentiable(Declaration):
    """A declaration whose gradient is other declarations."""

    def backward(self, wanted: Collection[str], present: Collection[str]) -> tuple[Self, ...]:
        """The ops that compute gradients, in order, without steps and skippable outputs that are not read.

        Args:
            wanted: the inputs that need a gradient.
            present: the inputs that are not None. An output that is absent because an input is does not narrow an op.
        """
        read = {f"d{name}" for name in wanted if name in present}
        chosen: list[Self] = []
        for step in reversed(self.steps):
            if read & step.outputs.keys():
                absent = self._absent(step, present)
                idle = any(t.skippable for name, t in step.outputs.items() if name not in read | absent)
                chosen.insert(0, step.only(*read) if idle else step)
                read |= chosen[0].inputs.keys()
        return tuple(chosen)

    def saved_by(self, wanted: Collection[str], present: Collection[str]) -> Self | None:
        """:attr:`saving` with the outputs that the gradients of these inputs read; None if they read only what this op
        has, too. Arguments as in :meth:`backward`.
        """
        if self.saving is None:
            return None
        read = {name for step in self.backward(wanted, present) for name in step.inputs}
        read |= {gradient for name, gradient in self.scaled.items() if name in wanted and name in present}
        if read.isdisjoint(self.saving.outputs.keys() - self.outputs.keys()):
            return None
        return self.saving.only(*read, *self._absent(self.saving, present))

    def _absent(self, step: Self, present: Collection[str]) -> set[str]:
        """The outputs of a step that are absent because an input of this op is."""
        return {name for name, t in step.outputs.items() if t.given in self.inputs and t.given not in present}

    def only(self, *outputs: str) -> Self:
        """The op without the skippable outputs that are not named here; the same object every time."""
        left = tuple(name for name, t in self.outputs.items() if name in outputs or not t.skippable)
        if left == tuple(self.outputs):
            return self
        return once(self, left, lambda: (self.narrow or self._without)(self.name_of(left), left))

    def _without(self, name: str, left: tuple[str, ...]) -> Self:
        """The op with this name and these outputs, whose kernel gets None for the others."""
        op, skipped = copy(self), frozenset(k for k, output in enumerate(self.outputs) if output not in left)
        op.name = name
        op.outputs = {output: self.outputs[output] for output in left}
        op.grad, op.no_gradient, op.scaled, op.make_batched = None, (), {}, None
        op.reference = partial(_without, skipped, self.reference)
        update_wrapper(op.reference, self.reference, ("__module__",), ())  # where it is declared
        op.derive()
        return op

    @property
    def narrowed(self) -> tuple[Self, ...]:
        """The op without some of its skippable outputs: one for each of :attr:`narrowings`."""
        return tuple(self.only(*left) for left in self.narrowings)

    def with_same_as(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name; an output that is declared ``same_as`` another one gets that one's array if it has none."""
        shared = {name: t.same_as for name, t in self.outputs.items() if t.same_as and outputs.get(name) is None}
        return {name: outputs[shared.get(name, name)] for name in outputs}


def _without(skipped: Collection[int], reference: Callable[..., Any], *args: Any, **attrs: Any) -> tuple[Any, ...]:
    """Call a reference and drop the outputs with the ``skipped`` indices."""
    returned = reference(*args, **attrs)
    results = returned if isinstance(returned, tuple) else (returned,)
    return tuple(result for k, result in enumerate(results) if k not in skipped)
