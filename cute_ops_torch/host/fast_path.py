"""The way past the dispatcher: from tensors to the compiled function, with a node for autograd where one is due.

The raw op's Autograd kernel and the Python function share it. Both look into the table first, by the shape of the first
input; a call that nothing watches, but which is not in there, teaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_ops.op import Op
from cute_ops_torch.host.guards import Kinds, guarded, kinds, unknown
from cute_ops_torch.host.launch import REMEMBERED, Launcher, Ready, make_room
from cute_ops_torch.library.autograd import graph_node, node_of
from cute_ops_torch.library.schema import define, parameters

Call = Callable[..., Any]
Before = Callable[[Call], Call]  # the function of some calls, of that of others
ALIKE = 3  # functions per shape: each that does not fit costs a call its time


class Direct:
    """One op.

    Attributes:
        table: functions of calls by the shape of their first input. Each returns None for what does not look like
            the call that it was made for.
        learn: ``learn(*inputs, *attributes)`` runs a call that nothing watches, and puts it into the table.
    """

    def __init__(self, op: Op, parts: Callable[[], tuple[Launcher, Call | None]]) -> None:
        self.op, self._parts = op, parts
        self.table: dict[Any, Call] = {}
        self._learn: Call | None = None
        self._made: dict[Any, Before] = {}
        self._alike: dict[Any, list[Before]] = {}
        self._nodes: dict[Any, Call] = {}

    def learn(self, *args: Any) -> Any:
        # Written out by the first call: a process uses few of the ops that there are.
        if self._learn is None:
            self._learn = _learner(self)
        return self._learn(*args)

    def make(self, ready: Ready, kind: Kinds, tensors: tuple[Any, ...], attrs: tuple[Any, ...]) -> Before:
        """The function of calls like this one, before that of others."""
        op, gradient = self.op, self._parts()[1]
        make_room(REMEMBERED, self.table, self._made, self._alike)
        run, values = f"_run({', '.join(op.inputs)})", {"_run": ready.run, "_ad": forward_ad}
        if any(asks for _, asks in kind):
            values["_grad_enabled"] = torch.is_grad_enabled
            node = "None"  # raises when it is differentiated, with this call's shapes
            if op.grad is not None and gradient is not None:
                given = tuple(name for name, t in zip(op.inputs, tensors, strict=True) if t is not None)
                values["_node"], node = self._node(gradient, given, attrs), f"_node(_run, {', '.join(given)})"
            run = f"{node} if _grad_enabled() else {run}"
        texts = {
            "parameters": parameters(op), "arguments": ", ".join((*op.inputs, *op.attrs)), "result": run,
            "condition": "_ad._current_level < 0",
        }  # fmt: skip
        made = self._made[(ready, kind)] = guarded(op, tensors, attrs, texts, **values)
        return made

    def put(self, shape: Any, known: Before) -> Call:
        """Into the table, before those that are known for the shape: what does not fit one asks the next."""
        alike = self._alike[shape] = [known, *(k for k in self._alike.get(shape, ()) if k is not known)][:ALIKE]
        call: Call = unknown
        for before in reversed(alike):
            call = before(call)
        self.table[shape] = call
        return call

    def _node(self, gradient: Call, given: tuple[str, ...], attrs: tuple[Any, ...]) -> Call:
        key = (given, tuple((type(a), a) for a in attrs))
        if key not in self._nodes:
            make_room(REMEMBERED, self._nodes)
            self._nodes[key] = node_of(self.op, gradient, given, attrs).apply
        return self._nodes[key]


_SOURCE = """
def learn({parameters}):
    _ready = _find({arguments})
    _kind = ({kinds},)
    _known = _get((_ready, _kind)) or _make(_ready, _kind, ({tensors},), ({attrs}))
    _out = _put({lead}.shape, _known)({arguments})
    return _otherwise({arguments}) if _out is None else _out
"""


def _learner(direct: Direct) -> Call:
    op, (cuda, gradient) = direct.op, direct._parts()
    node: Any = None

    def otherwise(*args: Any) -> Any:
        """Without a guard."""
        nonlocal node
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return cuda.launch(*args)
        if node is None:
            node = graph_node(op, gradient).apply
        return node(cuda.launch, *args)

    source = _SOURCE.format(
        parameters=parameters(op), arguments=", ".join((*op.inputs, *op.attrs)), tensors=", ".join(op.inputs),
        attrs="".join(f"{name}, " for name in op.attrs), kinds=kinds(op), lead=next(iter(op.inputs)),
    )  # fmt: skip
    space = define(
        source, f"learn {op.name}", _find=cuda.find, _put=direct.put, _get=direct._made.get, _make=direct.make,
        _otherwise=otherwise,
    )  # fmt: skip
    return space["learn"]  # type: ignore[no-any-return]
