"""Choose between our kernel and Inductor's fusion where ``max-autotune`` asks for the faster one.

With our kernel Inductor must write its inputs and read its outputs in kernels of their own. If pointwise neighbours
fuse with the op's reference, Inductor's single kernel may be faster. Timing the op alone cannot tell, so it is timed
with its neighbours: both forms of that part of the graph are compiled and timed once, and the op is lowered in the
faster form.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import process_subgraph_nodes
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from cute_ops import env
from cute_ops.declaration.op import Op
from cute_ops_torch.inductor import measured_times
from cute_ops_torch.library.reference import traced_reference

log = logging.getLogger("cute_ops")
DEVICES = {"cuda"}  # on a CPU an op runs its reference, which cannot win
MOST = 48  # nodes of a subgraph
MARGIN = 0.97  # timings repeat within 3%; a tie goes to our kernel

_aten, _prims = torch.ops.aten, torch.ops.prims
# Inductor fuses these, which torch does not tag as pointwise: views, casts, and reductions that follow.
_FUSED = {
    getattr(space, name)
    for space, names in (
        (_aten, ("expand", "view", "reshape", "unsqueeze", "squeeze", "permute", "slice", "select", "clone", "cat")),
        (_aten, ("split", "split_with_sizes", "_to_copy", "full", "scalar_tensor")),
        (_prims, ("convert_element_type",)),
    )
    for name in names
}
_REDUCED = {getattr(_aten, name) for name in ("sum", "mean", "amax", "amin")}

# Milliseconds of subgraphs that were timed: with our kernel, fused.
_known: dict[str, tuple[float, float]] = {}
_measuring = False


def asked_for(device: torch.device) -> bool:
    """Whether this compilation wants the faster form at the price of compiling more."""
    asked = config.max_autotune or config.max_autotune_pointwise or asked_by_environment()
    return asked and device.type in DEVICES and not _measuring


def asked_by_environment() -> bool:
    return env.TUNE.read() == "1"


def decomposed(op: Op, overload: Any, node: Node, arguments: Sequence[Any]) -> Any:
    """The op as Inductor's own code on these buffers if that is faster; None if not, or if nothing would fuse."""
    try:
        subgraph = neighbourhood(node)
        if subgraph is None:
            return None
        ours, theirs = measured(op, overload, subgraph)
        text = "torch.compile: %s with %d neighbours: ours %.4f ms, fused by Inductor %.4f ms"
        neighbours = sum(n.target is not operator.getitem for n in subgraph.nodes) - 1
        log.info(text, op.name, neighbours, ours, theirs)
        return _inlined(op, node, arguments) if fused_wins(ours, theirs) else None
    except Exception as error:  # a form that cannot run has lost
        log.warning("torch.compile: %s stays as it is, Inductor's own form of it cannot compete: %s", op.name, error)
        return None


def fused_wins(ours: float, theirs: float) -> bool:
    """Whether Inductor's form is faster by more than timings vary."""
    return theirs < MARGIN * ours


# The subgraph


class Subgraph(NamedTuple):
    """An op and the neighbours that would fuse with it.

    Attributes:
        nodes: in the graph's order, with the nodes that take one of several outputs.
        inputs: nodes outside that they read.
        outputs: those of them that are read outside.
    """

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Node]


def neighbourhood(node: Node) -> Subgraph | None:
    """The subgraph around a node, None if it has no neighbour to fuse with."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    members = {node}
    _add_producers(members, node)
    _add_users(members, node, order)
    if all(n is node or n.target is operator.getitem or _is_view(n) for n in members):
        return None
    nodes = sorted(members, key=order.__getitem__)
    inputs = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in members)
    outputs = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and not members.issuperset(n.users)]
    return Subgraph(nodes, list(inputs), outputs)


def _add_users(members: set[Node], node: Node, order: Mapping[Node, int]) -> None:
    waiting = [node]
    while waiting and len(members) < MOST:
        for user in waiting.pop().users:
            item = user.target is operator.getitem and user.args[0] in members
            if user in members or not (item or _fuses(user, after=True)):
                continue
            found = {user}
            _add_producers(found, user, members)
            outside = {i for n in found for i in n.all_input_nodes} - found - members
            # A later node from elsewhere has not run when the op does.
            if all(i.op in ("placeholder", "get_attr") or order[i] < order[node] for i in outside):
                members |= found
                waiting.append(user)


def _add_producers(members: set[Node], node: Node, known: Set[Node] = frozenset()) -> None:
    waiting = list(node.all_input_nodes)
    while waiting and len(members) < MOST:
        producer = waiting.pop()
        if producer not in members and producer not in known and _fuses(producer):
            members.add(producer)
            waiting += producer.all_input_nodes


def _fuses(node: Node, after: bool = False) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    known = target.overloadpacket in _FUSED or (after and target.overloadpacket in _REDUCED)
    return (known or torch.Tag.pointwise in target.tags) and not target._schema.is_mutable


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


# Both forms of it, and their times


def measured(op: Op, overload: Any, subgraph: Subgraph) -> tuple[float, float]:
    """Milliseconds of the subgraph with our kernel and as Inductor fuses it, for the sizes first seen."""
    module, values = _extracted(subgraph), [_concrete(n.meta["val"]) for n in subgraph.inputs]
    return _timed((module, values), (_Decomposed(module, op, overload), values), module.code)


def compared(ours: Subgraph, theirs: Subgraph) -> tuple[float, float]:
    """Milliseconds of two parts of a graph of which one computes what the other does, for the sizes first seen."""
    one, other = ((_extracted(part), [_concrete(n.meta["val"]) for n in part.inputs]) for part in (ours, theirs))
    return _timed(one, other, f"{one[0].code}\n{other[0].code}")


def part_of(nodes: Sequence[Node], outputs: Sequence[Node], order: Mapping[Node, int]) -> Subgraph:
    """The part of a graph with these nodes that makes these outputs."""
    members = sorted(nodes, key=order.__getitem__)
    inside = set(members)
    inputs = dict.fromkeys(each for node in members for each in node.all_input_nodes if each not in inside)
    return Subgraph(members, list(inputs), list(dict.fromkeys(outputs)))


Form = tuple[Callable[..., Any], list[Any]]  # what runs, and what it is called with


def _timed(ours: Form, theirs: Form, code: str) -> tuple[float, float]:
    """Milliseconds of both forms: as they were measured before, in this process or another one, or now."""
    global _measuring
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    key = measured_times.key_of(device, code, ours[1], theirs[1])
    known = _known.get(key) or measured_times.recall(key)
    if known is None:
        _measuring = True
        try:
            known = _milliseconds(*ours), _milliseconds(*theirs)
        finally:
            _measuring = False
        measured_times.keep(key, known)
    _known[key] = known
    return known


class _Like(NamedTuple):
    """How to make a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def filled(self) -> torch.Tensor:
        """Random numbers from a generator of its own; zeros for integers, which are valid as any index."""
        if not self.dtype.is_floating_point or self.dtype.itemsize == 1:
            return self.empty().zero_()
        return self.empty().uniform_(generator=torch.Generator(self.device).manual_seed(0))


def _concrete(value: Any) -> Any:
    """A symbolic value at the size that it was traced with."""
    if isinstance(value, torch.Tensor):
        shape, stride = (tuple(_concrete(s) for s in sizes) for sizes in (value.shape, value.stride()))
        return _Like(shape, stride, value.dtype, value.device)
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _extracted(subgraph: Subgraph) -> GraphModule:
    graph, copies = Graph(), {}
    for k, outside in enumerate(subgraph.inputs):
        copies[outside] = graph.placeholder(f"in_{k}")
    for k, node in enumerate(subgraph.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = f"node_{k}"
    graph.output(tuple(copies[n] for n in subgraph.outputs))
    return GraphModule(torch.nn.Module(), graph)


class _Decomposed(Interpreter):
    """A subgraph with the op's reference in its place."""

    def __init__(self, module: GraphModule, op: Op, overload: Any) -> None:
        super().__init__(module)
        self.op, self.overload = op, overload

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is self.overload:
            return traced_reference(self.op, *args, **kwargs)
        return super().call_function(target, args, kwargs)

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


def _milliseconds(form: Callable[..., Any], values: Sequence[Any]) -> float:
    where = [k for k, value in enumerate(values) if isinstance(value, _Like)]

    def call(*tensors: Any) -> Any:
        given = dict(zip(where, tensors, strict=True))
        return form(*(given.get(k, value) for k, value in enumerate(values)))

    likes = [value for value in values if isinstance(value, _Like)]
    with _disable_current_modes(), FakeTensorMode() as mode:
        fakes = [like.empty() for like in likes]
        module = make_fx(call, decomposition_table=select_decomp_table())(*fakes)
        graph = GraphLowering(module, example_inputs=fakes, is_inference=True, name="cute_ops_choice")
    quick = {"max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False, "cpp_wrapper": False}
    with V.set_fake_mode(mode), V.set_graph_handler(graph), V.set_debug_handler(DebugContext()), config.patch(quick):
        graph.run(*fakes)
        compiled = graph.compile_to_module().call
    with _disable_current_modes(), torch.no_grad():
        tensors = [like.filled() for like in likes]
        return float(benchmarker.benchmark(lambda: compiled([*tensors]), device=tensors[0].device))


# The op as Inductor's code


def _inlined(op: Op, node: Node, arguments: Sequence[Any]) -> Any:
    """Lower the reference in the op's place; Inductor's scheduler fuses it with its neighbours."""
    given = [a.meta["val"] if isinstance(a, Node) else a for a in _aligned(op, node)]
    where = [k for k, value in enumerate(given) if isinstance(value, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        present = dict(zip(where, tensors, strict=True))
        made = traced_reference(op, *(present.get(k, value) for k, value in enumerate(given)))
        return made if isinstance(made, tuple) else (made,)

    with V.fake_mode:
        module = make_fx(call, decomposition_table=select_decomp_table())(*(given[k] for k in where))
    whole, V.graph.module = V.graph.module, module
    try:
        outputs = process_subgraph_nodes(module, [arguments[k] for k in where])
    finally:
        V.graph.module = whole
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _aligned(op: Op, node: Node) -> list[Any]:
    """A call's arguments in the declaration's order."""
    names = (*op.inputs, *op.attrs)
    default = {**dict.fromkeys(op.inputs), **op.attrs}
    given = {**default, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [given[name] for name in names]
