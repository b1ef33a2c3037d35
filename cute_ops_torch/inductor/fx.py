"""Questions about the nodes of a graph before autograd: one of Dynamo, or of ATen's operators from ``torch.export``."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from cute_ops_torch.inductor.effects import example, name_of, storage_of, written_by


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that a node was traced with, None if it made no tensor."""
    value = example(node)
    return value if isinstance(value, torch.Tensor) else None


def calls(node: Any, *names: str) -> bool:
    """Whether a node calls torch's function, operator or method of one of these names."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        name = str(node.target)
        if name.startswith("__") and name.endswith("__"):  # some versions of Dynamo trace operators so
            return name[2:-2] in names or f"{name[2:-2]}_" in names
        return name in names
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == "aten" and name_of(node.target) in names
    return any(node.target is getattr(space, name, None) for name in names for space in (operator, torch, F))


def hint(size: Any) -> int:
    """A size as it was when it was traced, 0 of one that depends on data; nothing is guarded."""
    known: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return 0 if known is None else int(known)


def changed(graph: Graph, since: Any, until: Any) -> bool:
    """Whether a node between two others writes in place: perhaps to a view of what a pattern has read."""
    order = list(graph.nodes)
    return any(map(written_by, order[order.index(since) + 1 : order.index(until)]))


def written_later(graph: Graph, node: Any, *read: Any) -> bool:
    """Whether any of what a node reads is written to after it, which an op that keeps it for its gradient does not
    allow.
    """
    memory, order = [storage_of(value_of(each)) for each in read], list(graph.nodes)
    later = (each for writer in order[order.index(node) + 1 :] for each in written_by(writer))
    return any(storage_of(value_of(each)) in memory for each in later)
