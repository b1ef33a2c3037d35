"""Effects of a node of a graph besides its result: writes in place, random numbers, and modes that it switches.

What a function may do at all is worked out once for each function; most nodes have no effect and are not looked at.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_WRITERS = ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior", "ipow", "imatmul", "ifloordiv")
# Functions that update the running statistics among their arguments.
_STATISTICS = {"batch_norm": (1, 2), "instance_norm": (1, 2)}
_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson", "rand_like",
           "randn_like", "randint_like", "rrelu", "gumbel_softmax", "scaled_dot_product_attention")  # fmt: skip


def example(node: Any) -> Any:
    """The value that a node was traced with, by AOTAutograd or by Dynamo."""
    if not isinstance(node, Node):
        return None
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def storage_of(value: Any) -> int:
    """The number of a tensor's memory; that of no tensor is 0."""
    try:
        return int(value.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):  # no tensor, or one of a subclass without memory
        return 0


@cache
def name_of(target: Any) -> str:
    """The name of what a node calls, ``__add__`` as ``add``."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name.rpartition("::")[2])
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name.startswith("__") and name.endswith("__"):
        return str(name[2:-2])
    return str(name)


def has_effects(node: Node) -> bool:
    """Whether a node may write in place, draw random numbers or switch a mode."""
    return _may_affect(node.target) or (bool(node.kwargs) and ("out" in node.kwargs or "inplace" in node.kwargs))


@cache
def _may_affect(target: Any) -> bool:
    return name_of(target) in MODES or _may_write(target) or _may_draw(target) or is_transform(target)


@cache
def is_transform(target: Any) -> bool:
    """Whether a function is a step of a transform (``torch.func.grad``, ``vmap``), which changes their state."""
    return str(getattr(target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch"))


def is_transformed(value: Any) -> bool:
    """Whether a tensor is wrapped by a transform of ``torch.func``: outside of the transform no op can take it."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def same_mode(graph: Graph, one: Node, other: Node) -> bool:
    """Whether two nodes run with gradients, autocast and inference mode switched alike."""
    state: dict[Any, Any] = {"grad": torch.is_grad_enabled()}
    seen = []
    for node in graph.nodes:
        if node is one or node is other:
            seen.append(dict(state))
        if node.op != "call_function" or (name := name_of(node.target)) not in MODES:
            continue
        if name == MODES[0]:
            state["grad"] = node.args[0]
        elif name.startswith("_exit"):
            state.pop(node.args[0], None)
        else:
            state[node] = name
    return len(seen) == 2 and seen[0] == seen[1]


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers: others that do must not change places with it."""
    if not _may_draw(node.target):
        return False
    name = name_of(node.target)
    return _dropped(node, name) if name in DROPOUT or name == "scaled_dot_product_attention" else True


@cache
def _may_draw(target: Any) -> bool:
    name = name_of(target)
    tags = getattr(target, "tags", None) or ()
    return name in DROPOUT or name in _RANDOM or torch.Tag.nondeterministic_seeded in tags


def _dropped(node: Node, name: str) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return bool(training) and bool(p != 0)


def written_by(node: Node) -> Sequence[Node]:
    """The nodes that a node writes to."""
    if node.op not in ("call_function", "call_method"):
        return ()
    if not _may_write(node.target) and not ("out" in node.kwargs or "inplace" in node.kwargs):
        return ()
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _written_by_bodies(node)
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        return _nodes([given.get(name) for name, is_written in zip(names, written, strict=True) if is_written])
    return [*_nodes(node.kwargs.get("out")), *_written_by_function(node, name_of(node.target))]


@cache
def _may_write(target: Any) -> bool:
    """Whether a call of a function may write to its arguments, or does where an argument ``inplace`` is true."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
    name = name_of(target)
    known = name in _STATISTICS or name == "embedding" or name in _WRITERS
    return known or name.endswith("_") or (callable(target) and _place_of_inplace(target) is not None)


def _written_by_function(node: Node, name: str) -> Sequence[Node]:
    first = [each for each in node.args[:1] if isinstance(each, Node)]
    if name in _STATISTICS:
        return [
            each for each in (node.args[i] for i in _STATISTICS[name] if len(node.args) > i) if isinstance(each, Node)
        ]
    if name == "embedding" and (node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")) is not None:
        return _nodes(node.args[1:2])
    if name in _WRITERS and (node.op == "call_function" or str(node.target).startswith("__")):
        return first
    if name.endswith("_") and node.target not in (operator.and_, operator.or_, operator.not_):
        return _nodes(node.args[:1])
    return first if _in_place(node) else ()


def _written_by_bodies(node: Node) -> list[Node]:
    """All tensors that a call with bodies reads, if a body or a kernel of Triton's in it may write to them."""
    owner = node.graph.owning_module
    bodies = [getattr(owner, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
    inner = [each for body in bodies if isinstance(body, GraphModule) for each in body.graph.nodes]
    writes = "triton" in name_of(node.target) or any(map(written_by, inner))
    return [each for each in node.all_input_nodes if isinstance(example(each), torch.Tensor)] if writes else []


def _nodes(given: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(given, found.append)
    return found


def _in_place(node: Node) -> bool:
    """Whether an argument ``inplace`` is true."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    place = _place_of_inplace(node.target) if callable(node.target) else None
    return place is not None and len(node.args) > place and bool(node.args[place])


@cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C
        return None
    return parameters.index("inplace") if "inplace" in parameters else None
