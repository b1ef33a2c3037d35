"""Metrics from the logits of a linear head: the predicted class (accuracy) and the log-sum-exp (z-loss).

The op of the head's loss computes both, so logits need not be held for them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cute_ops_torch.inductor.effects import MODES, name_of
from cute_ops_torch.inductor.fx import calls, value_of

_SAME = ("detach", "float", "contiguous")
_MOVED = ("view", "reshape", "flatten", "contiguous", "to", "long", "getitem")


class Metric(NamedTuple):
    """A number of each row.

    Attributes:
        node: what computes it.
        predicted: whether it is the greatest class; else it is the log-sum-exp.
        rows: the view of the logits, or the layer, whose rows these are; None before it is known.
    """

    node: Node
    predicted: bool
    rows: Any = None


def of(readers: Iterable[Any], dims: int) -> list[Metric] | None:
    """The metrics that readers of logits with ``dims`` dims compute; None if a reader computes anything else."""
    found: list[Metric] = []
    for node in readers:
        metrics = _of_reader(node, dims)
        if metrics is None:
            return None
        found += metrics
    return found


def _of_reader(node: Any, dims: int) -> list[Metric] | None:
    if calls(node, *_SAME):
        return _of_same(node, dims)
    if not calls(node, "argmax", "max", "logsumexp") or not _is_of_last_dim(node, dims):
        return None
    if calls(node, "max"):
        taken = [user for user in node.users if user.users]
        return [Metric(user, True) for user in taken] if all(map(_is_place, taken)) else None
    predicted = calls(node, "argmax")
    return [Metric(node, predicted)] if predicted or _is_float32(node) else None


def _of_same(node: Node, dims: int) -> list[Metric] | None:
    """The metrics that read logits through a node that changes at most their dtype."""
    value = value_of(node)
    inner = of(node.users, dims) if value is not None and value.is_floating_point() else None
    if inner is None or _is_float32(node):
        return inner
    return inner if all(metric.predicted for metric in inner) else None


def _is_float32(node: Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype == torch.float32


def _is_of_last_dim(node: Node, dims: int) -> bool:
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    axes = given if isinstance(given, (tuple, list)) else [given]
    return len(axes) == 1 and isinstance(axes[0], int) and axes[0] % dims == dims - 1


def _is_place(node: Node) -> bool:
    """Whether a node takes the indices of ``max``."""
    return calls(node, "getitem") and bool(node.args[1] == 1)


def place(graph: Graph, readers: Sequence[Node], layer: Node, target: Node) -> Node | None:
    """The node before which a loss can be computed whose results replace these nodes: the first of them, or where modes
    are switched after the layer. Views that the target is are moved before it; None if that needs more than views.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = min(readers, key=order.__getitem__)
    between = (node for node in list(graph.nodes)[order[layer] + 1 : order[first]] if name_of(node.target) in MODES)
    first = next(between, first)
    late: set[Node] = set()
    waiting = [target]
    while waiting:
        node = waiting.pop()
        if order[node] >= order[first] and node not in late:
            if not calls(node, *_MOVED):
                return None
            late.add(node)
            waiting += node.all_input_nodes
    for node in sorted(late, key=order.__getitem__):
        first.prepend(node)
    return first


def put(graph: Graph, metric: Metric, before: Node, result: Node, rows: Node) -> None:
    """Replace a metric by a copy of a loss' result, in the shape of the rows of a head's input.

    The copy is made at the loss' place: a program may write to its metrics, and may read them in inference mode, where
    no view of a value from outside can be made.
    """
    like, whole = value_of(metric.node), value_of(rows)
    assert like is not None and whole is not None
    column: Any = (..., slice(0, 1) if like.ndim == whole.ndim else 0)
    with graph.inserting_before(before):
        shape = graph.call_function(operator.getitem, (rows, column))
        shape.meta = {**metric.node.meta, "example_value": whole[column]}
        made = graph.call_method("view_as", (result, shape))
        made.meta = {**metric.node.meta, "example_value": like.to(torch.int32) if metric.predicted else like}
        if metric.predicted:
            made = graph.call_method("to", (made, like.dtype))
        else:
            if not like.requires_grad:
                made = graph.call_method("detach", (made,))
                made.meta = {**metric.node.meta, "example_value": like}
            made = graph.call_method("clone", (made,))
        made.meta = {**metric.node.meta, "example_value": like}
    metric.node.replace_all_uses_with(made)
