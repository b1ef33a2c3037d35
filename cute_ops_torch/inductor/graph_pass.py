"""``enable()``: ``torch.compile`` replaces what models write out by cute ops, so that an untouched model runs on them.

Known are Hugging Face's RMS norms (Llama's and Gemma's form, with the residual add before them), ``F.rms_norm``,
``F.layer_norm``, ``silu(gate) * up``, ``gelu(gate) * up`` and ``F.cross_entropy``. Attention loses a mask that is made
of sizes alone and says what ``is_causal=True`` says, or nothing: Hugging Face's models make such masks when they are
compiled for training, and any mask keeps attention from its flash kernel.

The pass works on the graph as Dynamo has captured it, before autograd, so that a replaced op brings its own gradient.
Values differ from the original's by rounding only: a cute op rounds once, to the dtype of its input.

>>> import cute_ops_torch.inductor
>>> cute_ops_torch.inductor.enable()  # doctest: +SKIP
>>> torch.compile(model)(**inputs)  # doctest: +SKIP

What was replaced is logged at level INFO by the logger ``cute_ops`` and counted in :data:`replaced`.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from cute_ops.shapes import FLOATS
from cute_ops_torch import registry
from cute_ops_torch.inductor import cache_key
from cute_ops_torch.inductor.attention_mask import replace_mask
from cute_ops_torch.inductor.fx import calls, changed, value_of

log = logging.getLogger("cute_ops")
replaced: Counter[str] = Counter()
"""How often each op has replaced something in this process."""

_DTYPES = {getattr(torch, name) for name in FLOATS}


def enable(ops: Collection[str] | None = None, devices: Collection[str] = ("cuda",)) -> None:
    """Let ``torch.compile`` replace written-out patterns from now on. What is compiled already stays.

    Args:
        ops: names of the ops that may be used, and ``"attention_mask"``; all that are known where None.
        devices: device types whose graphs are touched. On a CPU the ops are the reference, slower than Inductor's code.

    Raises:
        ValueError: an op that replaces nothing.
    """
    unknown = set(ops or ()) - set(_REPLACE)
    if unknown:
        raise ValueError(f"cute_ops_torch.inductor.enable: {', '.join(sorted(unknown))} replaces nothing; {_known()}")
    disable()
    # Code from Inductor's caches calls the ops although no fake of theirs has run in this process.
    registry.register_lowerings()
    chosen = tuple(name for name in _REPLACE if (ops is None or name in ops) and _exists(name))
    config.pre_grad_custom_pass = Replace(chosen, tuple(devices), config.pre_grad_custom_pass)


def disable() -> None:
    """Undo :func:`enable`."""
    if isinstance(config.pre_grad_custom_pass, Replace):
        config.pre_grad_custom_pass = config.pre_grad_custom_pass.previous


class Replace(CustomGraphPass):  # type: ignore[misc]
    """The pass. It runs one that was set before it first."""

    def __init__(self, ops: tuple[str, ...], devices: tuple[str, ...], previous: Any) -> None:
        self.ops, self.devices, self.previous = ops, devices, previous

    def __call__(self, graph: Graph) -> None:
        for earlier in self._earlier():
            earlier(graph)
        found: Counter[str] = Counter()
        for name in self.ops:
            for node in list(graph.nodes):
                value = value_of(node)
                if node.users and value is not None and value.device.type in self.devices:
                    found[name] += bool(_REPLACE[name](graph, node))
        found = +found
        if found:
            graph.eliminate_dead_code()
            graph.lint()
            replaced.update(found)
            log.info("torch.compile: replaced by cute ops: %s", ", ".join(f"{n} x {k}" for n, k in found.items()))

    def uuid(self) -> Any:
        before = [earlier.uuid() if isinstance(earlier, CustomGraphPass) else None for earlier in self._earlier()]
        if not all(before):
            return None  # what runs before us has no name, so nothing after it can be cached
        what = (cache_key.package(), self.ops, self.devices, before)
        return hashlib.sha256(repr(what).encode()).digest()

    def _earlier(self) -> tuple[Any, ...]:
        if self.previous is None:
            return ()
        return tuple(self.previous) if isinstance(self.previous, (list, tuple)) else (self.previous,)


# What a node is and holds.


def _factors(node: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Both orders of a binary node's operands."""
    if calls(node, name) and len(node.args) == 2 and not node.kwargs:
        yield node.args
        yield node.args[::-1]


def _uncast(node: Any, dtype: torch.dtype) -> Any:
    """What a cast to this dtype was made from; the node itself where it is none."""
    forms = calls(node, "float", "half", "bfloat16", "type_as") or (
        calls(node, "to") and len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"dtype"}
    )
    made, source = value_of(node), value_of(node.args[0]) if forms else None
    cast = made is not None and source is not None and made.dtype == dtype and made.device == source.device
    return node.args[0] if cast else node


def _rows(node: Any) -> torch.Tensor | None:
    """The value of a node that a kernel can read by rows."""
    value = value_of(node)
    fits = value is not None and value.dtype in _DTYPES and value.ndim and value.stride(-1) == 1
    return value if fits else None


def _vector(node: Any, like: torch.Tensor) -> bool:
    """A float vector as long as a row."""
    value = value_of(node)
    return value is not None and value.dtype in _DTYPES and tuple(value.shape) == (like.shape[-1],)


def _insert(graph: Graph, node: Any, op: str, *args: Any) -> Any:
    """The op at a node's place, with its value."""
    with graph.inserting_before(node):
        made = graph.call_function(getattr(torch.ops.cute, op).default, args)
    made.meta = dict(node.meta)
    return made


def _method(graph: Graph, like: Any, name: str, of: Any, value: Any, *rest: Any) -> Any:
    """A method's call, here. Without values on all of them AOTAutograd would not cache the graph."""
    made = graph.call_method(name, (of, *rest))
    made.meta = {**like.meta, "example_value": value}
    return made


def _finish(graph: Graph, node: Any, made: Any, dtype: torch.dtype) -> bool:
    """Puts ``made``, of ``dtype``, in a node's place."""
    value = value_of(node)
    assert value is not None
    if value.dtype != dtype:
        with graph.inserting_before(node):
            made = _method(graph, node, "to", made, value, value.dtype)
    node.replace_all_uses_with(made)
    return True


# The patterns: a function per op that replaces what it knows at a node.


class _Normalised(NamedTuple):
    """``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``, computed in float32; ``first`` is the first node of it."""

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
    value = value_of(node)
    scaled = _uncast(node, value.dtype) if value is not None else node
    for normed, scale in _factors(scaled, "mul"):  # Gemma's: scaled by one more than the weight, then rounded
        core = _normalised(normed)
        x = _rows(core.x) if core else None
        for weight, one in _factors(scale, "add"):
            weight = _uncast(weight, torch.float32)
            if not core or x is None or value is None or value.dtype != x.dtype or isinstance(one, Node):
                continue
            if one == 1 and _vector(weight, x):
                return _scaled(graph, node, core, weight, 1.0)
    for weight, normed in _factors(node, "mul"):  # Llama's: rounded, then scaled
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
    if op == "rmsnorm":
        made = _insert(graph, node, op, given["input"], *weights, None, float(eps), 0.0)
    else:
        made = _insert(graph, node, op, given["input"], *weights, float(eps))
    return _finish(graph, node, made, x.dtype)


def _layernorm(graph: Graph, node: Any) -> bool:
    return calls(node, "layer_norm") and _functional(graph, node, "layernorm", ("weight", "bias"))


def _add_rmsnorm(graph: Graph, node: Any) -> bool:
    """A residual add whose sum a replaced norm reads."""
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
            part = graph.call_function(operator.getitem, (both, k))
        part.meta = dict(old.meta)
        old.replace_all_uses_with(part)
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
    """Logits as they were before a cast to float32, which the op does not need: it would be an array of its own."""
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


# In this order: an add is replaced with the norm behind it.
_REPLACE: dict[str, Callable[[Graph, Any], bool]] = {
    "rmsnorm": _rmsnorm,
    "add_rmsnorm": _add_rmsnorm,
    "layernorm": _layernorm,
    "silu_mul": _gated("silu_mul", "silu"),
    "gelu_mul": _gated("gelu_mul", "gelu"),
    "cross_entropy": _cross_entropy,
    "attention_mask": replace_mask,
}


def _exists(name: str) -> bool:
    return ("cute", name) in registry._registered or name == "attention_mask"


def _known() -> str:
    return f"known are {', '.join(name for name in _REPLACE if _exists(name))}"
