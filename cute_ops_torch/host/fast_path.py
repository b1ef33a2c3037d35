"""The fast path of an op: from tensors to the compiled kernel past the dispatcher, with an autograd node where due.

The Autograd kernel of the raw op and the public function share it. Both look a call up by the shape of its first input;
a call that no mode observes and that is not found yet is specialized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_ops.declaration.op import Op
from cute_ops.jit import target
from cute_ops_torch.host import framework_gradient
from cute_ops_torch.host.compiled_call import CompiledCall
from cute_ops_torch.host.guards import Call, GuardedCalls, Link, guarded, kinds
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.library.copies import for_a_node
from cute_ops_torch.library.modes import modes
from cute_ops_torch.library.mutation import refuse_gradients
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.products import autocast
from cute_ops_torch.library.schema import filler, parameters


class FastPath:
    """One op.

    Attributes:
        launcher: makes the CUDA implementation.
        table: guarded calls by the shape of their first input. Each returns None for a call that it does not fit.
    """

    def __init__(
        self, op: Op, launcher: Callable[[], Launcher], nodes: Nodes, saving: Callable[[Op], Launcher] | None = None
    ) -> None:
        """``saving``: makes the CUDA implementation of an op that saves more for the gradient."""
        self._op, self.launcher, self._nodes, self._saving = op, launcher, nodes, saving
        self._calls = GuardedCalls(op, no_match)
        self.table: dict[Any, Call] = self._calls.table
        self._fill_defaults = filler(op)
        self._gradients: framework_gradient.Known = {}

    def specialize(self, *args: Any) -> Any:
        """Run a call that no mode observes, and put a guarded call for others like it into the table; in the mode of
        capture that :meth:`Launcher._specialize` says.
        """
        if not getattr(args[0], "is_cuda", False):
            return self._run_first(*args)
        with target.relaxed_capture():
            return self._run_first(*args)

    def _run_first(self, *args: Any) -> Any:
        args = self._fill_defaults(args)
        arity = len(self._op.inputs)
        tensors, attrs = args[:arity], args[arity:]
        given = [t for t in tensors if t is not None]
        differentiated = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        if differentiated:
            refuse_gradients(self._op, tensors)
        constants = len(self._op.attrs)
        by_torch = framework_gradient.differentiates(self._op, self.launcher, tensors, attrs, self._gradients)
        node = self._nodes.of(tensors, attrs[:constants]) if differentiated and not by_torch else None
        more = None if node is None or self._saving is None else node.saving
        launcher = self._saving(more) if more and self._saving else self.launcher()
        call = launcher.find(tensors, attrs)
        key = call, kinds(tensors), by_torch, call.unobserved and autocast()
        known = self._calls.put(tensors, key, lambda: self._guard(call, tensors, attrs, differentiated, by_torch))
        out = known(*args)
        if out is not None:
            return out
        # No guard fits where an attribute is NaN.
        run = call.run if node is None else partial(node.apply, call.run)
        return run(*given, *attrs[constants:])

    def _guard(
        self, call: CompiledCall, tensors: tuple[Any, ...], attrs: tuple[Any, ...], differentiated: bool, by_torch: bool
    ) -> Link:
        op, trained = self._op, call
        names = [name for name, t in zip(op.inputs, tensors, strict=True) if t is not None]
        given = ", ".join([*names, *op.scalars])
        values: dict[str, Any] = {"_run": _run_of(call), "_ad": forward_ad, "_modes": modes}
        conditions, result = ["not _modes()", "_ad._current_level < 0"], f"_run({given})"
        if any(t is not None and t.requires_grad for t in tensors) and not by_torch:
            values["_grad_enabled"] = torch.is_grad_enabled
            node = None if op.mutates else self._nodes.of(tensors, attrs[: len(op.attrs)])
            if node is None or (node.saving and not differentiated):
                conditions.append("not _grad_enabled()")
            else:
                if call.anywhere:  # the framework's product: ours may gain from copies that the backward reads, too
                    launcher = self._saving(node.saving) if node.saving and self._saving else self.launcher()
                    trained = for_a_node(launcher.find, tensors, attrs)
                values |= {"_node": node.apply, "_trained": _run_of(trained)}
                if node.saving:  # another kernel than without a gradient
                    conditions.append("_grad_enabled()")
                result = f"_node(_trained, {given}) if _grad_enabled() else {result}"
        return guarded(
            op, tensors, attrs, conditions, values, call.anywhere and trained.anywhere, parameters=parameters(op),
            arguments=", ".join((*op.inputs, *op.keywords)), result=result,
        )  # fmt: skip


def _run_of(call: CompiledCall) -> Call:
    """The function that runs a call; the guard sees autocast by the dispatch keys, as all modes."""
    return call.unobserved if call.unobserved and not autocast() else call.run


def no_match(*args: Any) -> None:
    """Ends a chain of guarded calls: the call is like none of them."""
