"""What the graph pass finds: for each op a function that replaces the pattern which ends at a node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from cute_ops.declaration.shapes import FLOATS
from cute_ops_torch.inductor.attention_mask import replace_mask
from cute_ops_torch.inductor.fx import calls, changed, value_of

_DTYPES = {getattr(torch, name) for name in FLOATS}


class _Normalised(NamedTuple):
    """``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps)`` in float32; ``first`` is its first node."""

    x: Any
    eps: float
    first: Any


def _normalised(node: Any) -> _Normalised | None:
    for wide, factor in _factors(node, "mul"):
        if not calls(factor, "rsqrt"):
            continue
        for mean, eps in _factors(factor.args[0], "add"):
            if isinstance(eps, (int, float)) and calls(mean, "mean") and _is_square(mean.args[0], wide) and _last(mean):
                value = value_of(wide)
                if value is not None and value.dtype == torch.float32:
                    x = _uncast(wide, torch.float32)
                    return _Normalised(x, float(eps), mean.args[0] if x is wide else wide)
    return None


def _is_square(node: Any, of: Any) -> bool:
    if calls(node, "pow"):
        return node.args[0] is of and node.args[1] == 2
    return (calls(node, "square") and node.args[0] is of) or (calls(node, "mul") and tuple(node.args) == (of, of))


def _last(mean: Any) -> bool:
    given = dict(zip(("dim", "keepdim"), mean.args[1:], strict=False)) | mean.kwargs
    return given.get("dim") in (-1, (-1,), [-1]) and given.get("keepdim") is True and set(given) <= {"dim", "keepdim"}


def _rmsnorm(graph: Graph, node: Any) -> bool:
    if calls(node, "rms_norm"):
        return _functional(graph, node, "rmsnorm", ("weight",))
    return _gemmas_rmsnorm(graph, node) or _llamas_rmsnorm(graph, node)


def _gemmas_rmsnorm(graph: Graph, node: Any) -> bool:
    """Scaled by one more than the weight, then rounded."""
    value = value_of(node)
    if value is None:
        return False
    for normed, scale in _factors(_uncast(node, value.dtype), "mul"):
        core = _normalised(normed)
        x = _rows(core.x) if core else None
        if not core or x is None or value.dtype != x.dtype:
            continue
        for weight, one in _factors(scale, "add"):
            weight = _uncast(weight, torch.float32)
            if not isinstance(one, Node) and one == 1 and _vector(weight, x):
                return _scaled(graph, node, core, weight, 1.0)
    return False


def _llamas_rmsnorm(graph: Graph, node: Any) -> bool:
    """Rounded, then scaled."""
    for weight, normed in _factors(node, "mul"):
        inner = value_of(normed)
        core = _normalised(_uncast(normed, inner.dtype)) if inner is not None else None
        x = _rows(core.x) if core else None
        if core and x is not None and inner is not None and inner.dtype == x.dtype and _vector(weight, x):
            return _scaled(graph, node, core, weight, 0.0)
    return False


def _scaled(graph: Graph, node: Any, core: _Normalised, weight: Any, offset: float) -> bool:
    if changed(graph, core.first, node):
        return False
    made = _insert(graph, node, "rmsnorm", core.x, weight, None, core.eps, offset)
    return _finish(graph, node, made, value_of(core.x).dtype)  # type: ignore[union-attr]


def _functional(graph: Graph, node: Any, op: str, tensors: tuple[str, ...]) -> bool:
    """``F.rms_norm`` and ``F.layer_norm`` over the last dim."""
    if node.op != "call_function":
        return False
    names = ("input", "normalized_shape", *tensors, "eps")
    given = dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | node.kwargs
    x, value = _rows(given["input"]), value_of(node)
    if x is None or value is None or set(given) != set(names) or value.dtype != x.dtype:
        return False
    if tuple(given["normalized_shape"]) != (x.shape[-1],):
        return False
    if not all(given[name] is None or _vector(given[name], x) for name in tensors):
        return False
    eps = given["eps"]
    if eps is None:
        eps = torch.finfo(torch.float32).eps if op == "rmsnorm" else 1e-5  # whatever the dtype of x is
    weights = [given[name] for name in tensors]
    others = (None, float(eps), 0.0) if op == "rmsnorm" else (float(eps),)
    return _finish(graph, node, _insert(graph, node, op, given["input"], *weights, *others), x.dtype)


def _layernorm(graph: Graph, node: Any) -> bool:
    return calls(node, "layer_norm") and _functional(graph, node, "layernorm", ("weight", "bias"))


def _add_rmsnorm(graph: Graph, node: Any) -> bool:
    """A residual add and the norm that reads its sum, which has been replaced already."""
    if node.target is not torch.ops.cute.rmsnorm.default:
        return False
    total, *rest = node.args
    if not calls(total, "add") or len(total.args) != 2 or total.kwargs:
        return False
    values = [_rows(t) for t in (*total.args, total)]
    if any(v is None or v.shape != values[-1].shape or v.dtype != values[-1].dtype for v in values):  # type: ignore[union-attr]
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    if any(isinstance(t, Node) and order[t] > order[total] for t in rest) or changed(graph, total, node):
        return False
    residual, x = total.args
    both = _insert(graph, total, "add_rmsnorm", x, residual, *rest)
    both.meta["example_value"] = (value_of(node), value_of(total))
    for k, old in enumerate((node, total)):
        with graph.inserting_after(both):
            output = graph.call_function(operator.getitem, (both, k))
        output.meta = dict(old.meta)
        old.replace_all_uses_with(output)
    return True


def _gated(op: str, activation: str) -> Callable[[Graph, Any], bool]:
    def replace(graph: Graph, node: Any) -> bool:
        for active, up in _factors(node, "mul"):
            if not calls(active, activation) or len(active.users) > 1 or active.op != "call_function":
                continue
            options = {k: v for k, v in active.kwargs.items() if (k, v) != ("inplace", False)}
            extra = (options.pop("approximate", "none"),) if activation == "gelu" else ()
            gate = active.args[0]
            a, b, value = _rows(gate), _rows(up), value_of(node)
            positional = len(active.args) > 1 and any(active.args[1:])
            if a is None or b is None or value is None or options or positional or changed(graph, active, node):
                continue
            if a.shape == b.shape == value.shape and a.dtype == b.dtype == value.dtype:
                return _finish(graph, node, _insert(graph, node, op, gate, up, *extra), a.dtype)
        return False

    return replace


def _cross_entropy(graph: Graph, node: Any) -> bool:
    if not calls(node, "cross_entropy") or node.op != "call_function":
        return False
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    default = (None, None, None, None, -100, None, "mean", 0.0)
    given = dict(zip(names, default, strict=True)) | dict(zip(names, node.args, strict=False)) | node.kwargs
    x, target, value = _rows(given["input"]), value_of(given["target"]), value_of(node)
    if any(given[name] is not None for name in ("weight", "size_average", "reduce")) or x is None or value is None:
        return False
    if target is None or x.ndim != 2 or target.ndim != 1 or target.dtype not in (torch.int64, torch.int32):
        return False
    if value.dtype != x.dtype or given["reduction"] not in ("mean", "sum", "none"):
        return False
    ignored, smoothing = given["ignore_index"], float(given["label_smoothing"])
    logits = _narrow(graph, node, given["input"])
    raw = _insert(graph, node, "cross_entropy", logits, given["target"], ignored, smoothing, 0.0)
    raw.meta.pop("example_value", None)
    losses, counted = target.new_empty(target.shape, dtype=torch.float32), target.ne(ignored)
    with graph.inserting_before(node):
        made = graph.call_function(operator.getitem, (raw, 0))
        made.meta = {**node.meta, "example_value": losses}
        if given["reduction"] != "none":
            made = _method(graph, node, "sum", made, losses.sum())
        if given["reduction"] == "mean":
            kept = graph.call_function(operator.ne, (given["target"], ignored))
            kept.meta = {**node.meta, "example_value": counted}
            made = graph.call_function(operator.truediv, (made, _method(graph, node, "sum", kept, counted.sum())))
            made.meta = {**node.meta, "example_value": losses.sum()}
    return _finish(graph, node, made, torch.float32)


def _narrow(graph: Graph, node: Any, wide: Any) -> Any:
    """Logits before a cast to float32: the op does not need the cast, which would write another array."""
    views, source = [], wide
    while calls(source, "view", "reshape", "contiguous") and source.op == "call_method":
        views.append(source)
        source = source.args[0]
    narrow = _uncast(source, torch.float32)
    if narrow is source or _rows(narrow) is None or changed(graph, source, node):
        return wide
    if any(value_of(view) is None for view in views):
        return wide
    dtype = value_of(narrow).dtype  # type: ignore[union-attr]
    with graph.inserting_before(node):
        for view in reversed(views):
            narrow = graph.call_method(view.target, (narrow, *view.args[1:]), dict(view.kwargs))
            narrow.meta = {**view.meta, "example_value": value_of(view).to(dtype)}  # type: ignore[union-attr]
    return narrow


def _factors(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Both orders of a binary node's operands."""
    if calls(node, name) and len(node.args) == 2 and not node.kwargs:
        yield node.args
        yield node.args[::-1]


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


def _vector(node: Any, like: torch.Tensor) -> bool:
    """Whether a node is a float vector as long as a row."""
    value = value_of(node)
    return value is not None and value.dtype in _DTYPES and tuple(value.shape) == (like.shape[-1],)


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


def _finish(graph: Graph, node: Any, made: Any, dtype: torch.dtype) -> bool:
    """Replace a node by ``made``, which has this dtype."""
    value = value_of(node)
    assert value is not None
    if value.dtype != dtype:
        with graph.inserting_before(node):
            made = _method(graph, node, "to", made, value, value.dtype)
    node.replace_all_uses_with(made)
    return True


# In this order: a residual add is replaced together with the norm that reads it.
PATTERNS: dict[str, Callable[[Graph, Any], bool]] = {
    "rmsnorm": _rmsnorm,
    "add_rmsnorm": _add_rmsnorm,
    "layernorm": _layernorm,
    "silu_mul": _gated("silu_mul", "silu"),
    "gelu_mul": _gated("gelu_mul", "gelu"),
    "cross_entropy": _cross_entropy,
    "attention_mask": replace_mask,
}
