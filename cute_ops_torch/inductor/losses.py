"""Replaces ``F.cross_entropy``: by our op, together with the product of a linear head where nothing else reads logits
but what :mod:`cute_ops_torch.inductor.loss_metrics` finds.

No expression says these: they pick one column of each row.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cute_ops.composite.gated_mlp import gated_mlp_apart
from cute_ops.declaration.shapes import FLOATS
from cute_ops_torch.inductor import loss_metrics
from cute_ops_torch.inductor.effects import name_of, same_mode
from cute_ops_torch.inductor.fx import calls, changed, value_of, written_later
from cute_ops_torch.inductor.loss_metrics import Metric
from cute_ops_torch.library.row_chunks import rows_in_saved
from cute_ops_torch.registry import define

_DTYPES = {getattr(torch, name) for name in FLOATS}


class _Loss(NamedTuple):
    """The arguments of a call that our ops compute."""

    logits: Any
    target: Any
    ignore_index: int
    reduction: str
    label_smoothing: float


def replace_loss(graph: Graph, node: Any, names: Collection[str], keeps_logits: bool = True) -> tuple[str, str]:
    """Replace a loss by one of the ops of these names; returns its name, empty for what stays, and why the product of a
    head before it stays.

    Without ``keeps_logits`` logits that the program also returns become NaNs, if they have a gradient.
    """
    loss = _loss(node)
    if loss is None:
        return "", ""
    if "linear_cross_entropy" in names and (head := _head(graph, node, loss.logits, keeps_logits)):
        if not head.metrics:
            _with_head(graph, node, loss, head)
            return "linear_cross_entropy", ""
        if place := loss_metrics.place(graph, [node, *(each.node for each in head.metrics)], head.layer, loss.target):
            _with_metrics(graph, node, place, loss, head)
            return "linear_cross_entropy_metrics", ""
    if "cross_entropy" in names and not written_later(graph, node, loss.logits):
        why = _other_reader(node, loss.logits)
        _alone(graph, node, loss)
        return "cross_entropy", why
    return "", ""


def _other_reader(loss: Any, logits: Any) -> str:
    """Other readers of the output of a linear layer that makes logits; empty if there are none."""
    source, reader, found, sliced = logits, loss, "", False
    while isinstance(source, Node) and (value := value_of(source)) is not None:
        for user in source.users:
            if user is not reader and (sliced or loss_metrics.of([user], value.ndim) is None):
                found = "the program returns" if user.op == "output" else f"{name_of(user.target)} reads"
        if calls(source, "linear"):
            return found and f"{found} its logits"
        sliced = sliced or calls(source, "getitem")
        source, reader = source.args[0] if source.args else None, source
    return ""


def _loss(node: Any) -> _Loss | None:
    if not calls(node, "cross_entropy") or node.op != "call_function":
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    default = (None, None, None, None, -100, None, "mean", 0.0)
    given = dict(zip(names, default, strict=True)) | dict(zip(names, node.args, strict=False)) | node.kwargs
    x, target, value = _rows(given["input"]), value_of(given["target"]), value_of(node)
    if any(given[name] is not None for name in ("weight", "size_average", "reduce")) or x is None or value is None:
        return None
    if target is None or x.ndim != 2 or target.ndim != 1 or target.dtype not in (torch.int64, torch.int32):
        return None
    if value.dtype != x.dtype or given["reduction"] not in ("mean", "sum", "none"):
        return None
    options = given["ignore_index"], given["reduction"], float(given["label_smoothing"])
    return _Loss(given["input"], given["target"], *options)


def _alone(graph: Graph, node: Any, loss: _Loss) -> None:
    target, ignored = value_of(loss.target), loss.ignore_index
    assert target is not None
    logits = _narrow(graph, node, loss.logits)
    raw = _insert(graph, node, "cross_entropy", logits, loss.target, ignored, loss.label_smoothing, 0.0)
    raw.meta.pop("example_value", None)
    with graph.inserting_before(node):
        made = graph.call_function(operator.getitem, (raw, 0))
        made.meta = {**node.meta, "example_value": target.new_empty(target.shape, dtype=torch.float32)}
        made = _reduced(graph, node, made, loss)
    _finish(graph, node, made, torch.float32)


def _reduced(graph: Graph, node: Any, made: Any, loss: _Loss) -> Any:
    """The reduction that is asked for of the losses of all rows, 0 where they are ignored."""
    target, losses = value_of(loss.target), value_of(made)
    assert target is not None and losses is not None
    if loss.reduction != "none":
        made = _method(graph, node, "sum", made, losses.sum())
    if loss.reduction == "mean":
        kept = _method(graph, node, "ne", loss.target, target.ne(loss.ignore_index), loss.ignore_index)
        count = _method(graph, node, "sum", kept, target.ne(loss.ignore_index).sum())
        made = _method(graph, node, "div", made, losses.sum(), count)
    return made


class _Head(NamedTuple):
    """A linear layer whose output a loss and its metrics alone read.

    Attributes:
        layer: the call of the layer.
        views: what happens to the rows of its output: views and slices, the first one first.
        returned: the nodes from the output on that the program returns, which are not kept.
        metrics: what else reads the logits.
    """

    layer: Any
    views: list[Any]
    returned: list[Any]
    metrics: list[Metric]


def _head(graph: Graph, node: Any, logits: Any, keeps_logits: bool) -> _Head | None:
    """The linear layer whose output are the logits of a loss, if the loss can be computed from its input instead."""
    head = _read_once(node, logits, keeps_logits)
    if head is None:
        return None
    layer = head.layer
    x, weight, *_ = layer.args if len(layer.args) > 1 else (None, None)
    made, hidden, matrix = value_of(layer), value_of(x), value_of(weight)
    if made is None or hidden is None or matrix is None or changed(graph, layer, node):
        return None
    if not same_mode(graph, layer, node) or written_later(graph, node, x, weight):
        return None
    if any(str(value_of(each).shape[:-1]) != str(made.shape[:-1]) for each in head.returned):  # type: ignore[union-attr]
        return None
    bias = value_of(_bias(layer))
    alike = hidden.dtype == matrix.dtype == made.dtype and (bias is None or bias.dtype == made.dtype)
    return head if alike and made.dtype in _DTYPES and hidden.ndim > 1 else None


def _read_once(loss: Any, logits: Any, keeps_logits: bool) -> _Head | None:
    """The linear layer and the views that logits are made by, if nothing but metrics of the same rows reads these."""
    views: list[Any] = []
    returned: list[Any] = []
    metrics: list[Metric] = []

    def is_read_once(source: Any, reader: Any = None) -> bool:
        made = value_of(source)
        if made is None:
            return False
        ends = [user for user in source.users if user.op == "output"]
        others = [user for user in source.users if user is not reader and user not in ends]
        if ends and keeps_logits:
            return False
        if ends and made.requires_grad:
            returned.append(source)
        elif ends:
            return False
        found = loss_metrics.of(others, made.ndim)
        if found is None or (found and any(calls(view, "getitem") for view in views)):
            return False
        metrics.extend(found)
        if calls(source, "linear") or _keeps_columns(source):
            metrics[:] = [each._replace(rows=each.rows or source) for each in metrics]
        return True

    source, reader = logits, loss
    while not calls(source, "linear"):
        if not isinstance(source, Node) or not is_read_once(source, reader):
            return None
        if _keeps_columns(source):
            views.append(source)
        elif not calls(source, "contiguous") and _uncast(source, torch.float32) is source:
            return None
        source, reader = source.args[0], source
    return _Head(source, views[::-1], returned, metrics) if is_read_once(source, reader) else None


def _bias(layer: Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else layer.kwargs.get("bias")


def _keeps_columns(node: Any) -> bool:
    """Whether a node only selects or renumbers rows."""
    made, given = value_of(node), value_of(node.args[0]) if node.args else None
    if made is None or given is None or not made.ndim or not given.ndim or str(made.shape[-1]) != str(given.shape[-1]):
        return False
    if node.op == "call_method" and calls(node, "view", "reshape"):
        return not isinstance(node.args[1], torch.dtype)
    if node.op == "call_method" and calls(node, "flatten"):
        return True
    if not calls(node, "getitem") or not isinstance(index := node.args[1], tuple):
        return False
    plain = all(each is ... or isinstance(each, slice) for each in index)
    return plain and ((len(index) < given.ndim and ... not in index) or index[-1] in (..., slice(None)))


def _with_head(graph: Graph, node: Any, loss: _Loss, head: _Head) -> None:
    """The loss from the head's input."""
    (hidden, _), weight = _rows_of_head(graph, node, node, head), head.layer.args[1]
    options = loss.ignore_index, loss.label_smoothing, 0.0, loss.reduction
    rows = _chunk_rows(graph, node, hidden, weight)
    with graph.inserting_before(node):
        made = graph.call_function(
            torch.ops.cute.linear_cross_entropy.default,
            (hidden, weight, loss.target, _bias(head.layer), *options),
            {} if rows is None else {"chunk_rows": rows},
        )
    target = value_of(loss.target)
    assert target is not None
    made.meta = {**node.meta, "example_value": target.new_empty(value_of(node).shape, dtype=torch.float32)}  # type: ignore[union-attr]
    _finish(graph, node, made, torch.float32)


def _chunk_rows(graph: Graph, node: Node, hidden: Any, weight: Any) -> int | None:
    """Rows whose logits fit half of the memory that gated MLPs need in the backward for products that they have not
    kept; None where that is too little, or not known.
    """
    ops = [define(gated_mlp_apart(transposed)).overload for transposed in (False, True)]
    before = itertools.takewhile(lambda each: each is not node, graph.nodes)
    layers = [[value_of(each.args[i]) for i in (0, 1, 3)] for each in before if each.target in ops]
    values = [value_of(each) for each in (hidden, weight)]
    every = [*values, *itertools.chain(*layers)]
    if not torch.is_grad_enabled() or any(t is None or not all(isinstance(s, int) for s in t.shape) for t in every):
        return None
    # The backward of a frozen down projection does not need the products that the projection multiplies.
    sizes = ((x.numel(), gate.numel(), x.shape[-1]) for x, gate, down in layers if down.requires_grad)  # type: ignore[union-attr]
    saved = sum(elements * weights // max(k, 1) ** 2 for elements, weights, k in sizes)
    return rows_in_saved(saved, *values)  # type: ignore[arg-type]


def _with_metrics(graph: Graph, node: Any, place: Any, loss: _Loss, head: _Head) -> None:
    """The losses of all rows from the head's input, with what metrics read; the loss of an ignored row is 0.

    The op knows nothing else of an ignored row, either: it gets another class instead, and the loss is masked.
    """
    (hidden, rows), weight = _rows_of_head(graph, node, place, head), head.layer.args[1]
    value = value_of(loss.target)
    assert value is not None
    ignored, losses = loss.ignore_index, value.new_empty(value.shape, dtype=torch.float32)

    def method(name: str, of: Any, made: torch.Tensor, *rest: Any) -> Any:
        with graph.inserting_before(place):
            return _method(graph, node, name, of, made, *rest)

    skipped = method("eq", loss.target, value.eq(ignored), ignored)
    target = method("masked_fill", loss.target, value, skipped, int(ignored == 0))
    options = _bias(head.layer), None, ignored, loss.label_smoothing
    raw = _insert(graph, place, "linear_cross_entropy_metrics", hidden, weight, target, *options)
    raw.meta = {key: each for key, each in node.meta.items() if key != "example_value"}
    kinds = (torch.float32, torch.float32, torch.float32, torch.int32)
    outputs = []
    for i, kind in enumerate(kinds):
        with graph.inserting_before(place):
            outputs.append(graph.call_function(operator.getitem, (raw, i)))
        outputs[-1].meta = {**node.meta, "example_value": losses.to(kind)}
    for metric in head.metrics:
        loss_metrics.put(graph, metric, place, outputs[3 if metric.predicted else 1], rows[metric.rows])
    kept = method("masked_fill", outputs[0], losses, skipped, 0.0)
    with graph.inserting_before(node):
        made = _reduced(graph, node, kept, loss)
    _finish(graph, node, made, torch.float32)


def _rows_of_head(graph: Graph, node: Any, place: Any, head: _Head) -> tuple[Any, dict[Any, Any]]:
    """The rows of the head's input, before a place, whose logits the loss takes; and those whose logits the layer, and
    each of the views after it, returned.
    """
    hidden, weight = head.layer.args[:2]
    rows = {head.layer: hidden}
    for each in head.returned:
        _return_nothing(graph, each, hidden)
    with graph.inserting_before(place):
        for view in head.views:
            if calls(view, "getitem"):
                made = graph.call_function(operator.getitem, (hidden, view.args[1]))
                value = hidden.meta["example_value"][view.args[1]]
            elif calls(view, "flatten"):
                made = graph.call_method("flatten", (hidden, *view.args[1:]), dict(view.kwargs))
                value = hidden.meta["example_value"].flatten(*view.args[1:], **view.kwargs)
            else:
                sizes = view.args[1] if isinstance(view.args[1], (tuple, list, torch.Size)) else view.args[1:]
                columns = value_of(weight).shape[1]  # type: ignore[union-attr]
                sizes = (*sizes[:-1], columns)
                made = graph.call_method("reshape", (hidden, sizes))
                shape = value_of(view).shape  # type: ignore[union-attr]
                value = hidden.meta["example_value"].new_empty((*shape[:-1], columns))
            made.meta = {**node.meta, "example_value": value}
            rows[view] = hidden = made
    return hidden, rows


def _return_nothing(graph: Graph, logits: Any, hidden: Any) -> None:
    """Return NaNs in place of logits: one for each row, which all classes share."""
    value, made = value_of(logits), hidden
    assert value is not None
    # Torch's own functions, of which AOTAutograd knows that graphs may be cached.
    steps: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (operator.getitem, ((..., slice(0, 1)),)), ("detach", ()), ("to", (value.dtype,)),
        (torch.full_like, (torch.nan,)), ("expand", (*[-1] * (value.ndim - 1), value.shape[-1])),
    )  # fmt: skip
    with graph.inserting_before(logits):
        for target, rest in steps:
            run = getattr(torch.Tensor, target) if isinstance(target, str) else target
            create = graph.call_method if isinstance(target, str) else graph.call_function
            node = create(target, (made, *rest))
            node.meta = {**logits.meta, "example_value": run(made.meta["example_value"], *rest)}
            made = node
    for user in [user for user in logits.users if user.op == "output"]:
        user.replace_input_with(logits, made)


def _narrow(graph: Graph, node: Any, wide: Any) -> Any:
    """Logits before a cast to float32: the op does not need the cast, which would write another array."""
    views, source = [], wide
    while calls(source, "view", "reshape", "contiguous") and source.op == "call_method":
        views.append(source)
        source = source.args[0]
    narrow = _uncast(source, torch.float32)
    if narrow is source or _rows(narrow) is None or changed(graph, source, node):
        return wide
    if any(value_of(view) is None for view in views) or written_later(graph, node, narrow):
        return wide
    dtype = value_of(narrow).dtype  # type: ignore[union-attr]
    with graph.inserting_before(node):
        for view in reversed(views):
            narrow = graph.call_method(view.target, (narrow, *view.args[1:]), dict(view.kwargs))
            narrow.meta = {**view.meta, "example_value": value_of(view).to(dtype)}  # type: ignore[union-attr]
    return narrow


def _uncast(node: Any, dtype: torch.dtype) -> Any:
    """The input of a cast to this dtype; the node itself if it is no cast."""
    forms = calls(node, "float", "half", "bfloat16", "type_as") or (
        calls(node, "to") and len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"dtype"}
    )
    made, source = value_of(node), value_of(node.args[0]) if forms else None
    cast = made is not None and source is not None and made.dtype == dtype and made.device == source.device
    return node.args[0] if cast else node


def _rows(node: Any) -> torch.Tensor | None:
    """The value of a node if a kernel can read it row by row, else None."""
    value = value_of(node)
    fits = value is not None and value.dtype in _DTYPES and value.ndim and value.stride(-1) == 1
    return value if fits else None


def _insert(graph: Graph, node: Any, op: str, *args: Any) -> Any:
    """Insert an op before a node, with the node's value."""
    with graph.inserting_before(node):
        made = graph.call_function(getattr(torch.ops.cute, op).default, args)
    made.meta = dict(node.meta)
    return made


def _method(graph: Graph, like: Any, name: str, of: Any, value: Any, *rest: Any) -> Any:
    """Insert the call of a method. AOTAutograd caches a graph only if every node has a value."""
    made = graph.call_method(name, (of, *rest))
    made.meta = {**like.meta, "example_value": value}
    return made


def _finish(graph: Graph, node: Any, made: Any, dtype: torch.dtype) -> None:
    """Replace a node by ``made``, which has this dtype."""
    value = value_of(node)
    assert value is not None
    if value.dtype != dtype:
        with graph.inserting_before(node):
            made = _method(graph, node, "to", made, value, value.dtype)
    node.replace_all_uses_with(made)
