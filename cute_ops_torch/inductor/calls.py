"""Replaces calls of torch's functions that no expression says, where our op computes the same: attention, embeddings.

Keys and values that a model repeats for the queries of their group are read as they were before: our attention takes
groups, so their copies and the sums of their copies' gradients disappear.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from cute_ops.composite import embedding as embeddings
from cute_ops.declaration.shapes import FLOATS
from cute_ops.ops.attention.attention import attention
from cute_ops_torch.composite.scaled_dot_product import computes, fits
from cute_ops_torch.inductor.attention_mask import ALL, ARGUMENTS, CAUSAL, is_mask, sides_of
from cute_ops_torch.inductor.emit import Emitter, Refused
from cute_ops_torch.inductor.fx import calls, value_of
from cute_ops_torch.inductor.strides import lie_alike, relaid, relay
from cute_ops_torch.registry import define

_FLOATS = {getattr(torch, name) for name in FLOATS}


def replace_call(graph: Graph, node: Any, names: Collection[str]) -> str:
    """Replace a call by one of the ops of these names; returns its name, empty for what stays."""
    if node.op != "call_function":
        return ""
    if "embedding" in names and calls(node, "embedding") and not isinstance(node.target, torch._ops.OpOverload):
        return "embedding" if _embedding(graph, node) else ""
    if "attention" in names and calls(node, "scaled_dot_product_attention"):
        if _attention(graph, node):
            return "attention"
        _lay_rows(graph, node)
    return ""


def _embedding(graph: Graph, node: Node) -> bool:
    """An embedding whose table is trained: our gradient of the table is one pass."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    index, table, made = value_of(given.get("input")), value_of(given.get("weight")), value_of(node)
    plain = given.get("max_norm") is None and not given.get("scale_grad_by_freq") and not given.get("sparse")
    if index is None or table is None or made is None or not plain:
        return False
    if not (made.requires_grad and _are_plain(index, table)) or table.dtype not in _FLOATS or table.ndim != 2:
        return False
    if index.dtype not in (torch.int64, torch.int32) or table.stride(-1) != 1:
        return False
    op = embeddings.embedding
    padding = embeddings.padding(given.get("padding_idx"), tuple(table.shape))
    emitter = Emitter(graph, node, lambda value: None)
    return _put(node, emitter, lambda: emitter.function(_lowered(op), given["input"], given["weight"], padding))


def _attention(graph: Graph, node: Node) -> bool:
    """Attention without dropout, of at least two queries that are as many as keys where it is causal; a mask is one
    that is known to be a window.
    """
    given: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, **dict(zip(ARGUMENTS, node.args, strict=False))}
    given |= node.kwargs
    nodes = [given.get("query"), *(_unrepeated(given.get(key)) for key in ("key", "value"))]
    q, k, v = map(value_of, nodes)
    causal, scale = given["is_causal"], given.get("scale")
    if q is None or k is None or v is None or not _has_known_options(given) or not _may_attend(q, k, v, causal):
        return False
    grouped = given.get("enable_gqa") or value_of(given["key"]) is not k or q.shape[1] == k.shape[1]
    if not grouped or k.shape[1] != v.shape[1]:
        return False
    sides = _sides(graph, node, given, q, k)
    if sides is None:
        return False
    scale = 0.0 if scale is None or scale == q.shape[-1] ** -0.5 else scale
    emitter = Emitter(graph, node, lambda value: None)

    def call() -> Node:
        turned = [emitter.method("transpose", each, 1, 2) for each in nodes]
        fixed = torch.are_deterministic_algorithms_enabled()  # Dynamo guards it
        limits = (sides[1] == 0, sides[0], -1 if sides[1] == 0 else sides[1])
        whole = emitter.function(_lowered(attention), *turned, None, scale, *limits, 0.0, fixed)
        return emitter.method("transpose", emitter.function(operator.getitem, whole, 0), 1, 2)

    return _put(node, emitter, call)


def _sides(
    graph: Graph, node: Node, given: Mapping[str, Any], q: torch.Tensor, k: torch.Tensor
) -> tuple[int, int] | None:
    """How many keys a call attends to before and behind each query; None where its mask is not known to be a window."""
    mask, causal = given.get("attn_mask"), given["is_causal"]
    if mask is None:
        return CAUSAL if causal else ALL
    return sides_of(graph, mask, node) if is_mask(mask, q, k) and not causal else None


def _lay_rows(graph: Graph, node: Node) -> None:
    """Give torch's attention scores' biases with rows in one piece: its fused kernels take no other."""
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    bias = value_of(mask)
    if not (isinstance(mask, Node) and bias is not None and type(bias) is FakeTensor and bias.layout == torch.strided):
        return
    if bias.is_floating_point() and bias.ndim and bias.stride(-1) != 1:
        node.replace_input_with(mask, Emitter(graph, node, lambda value: None).method("contiguous", mask))


def _has_known_options(given: Mapping[str, Any]) -> bool:
    """Whether a call of torch's attention has no dropout, and its options are constants."""
    scale = given.get("scale")
    known = scale is None or (isinstance(scale, float) and scale > 0)
    return given["dropout_p"] == 0 and known and isinstance(given["is_causal"], bool)


def _may_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Whether our attention takes these tensors: several queries, as many as keys where it is causal."""
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and _are_plain(q, k, v)
    if not (alike and q.ndim == 4 and computes(q) and fits(q, k, v) and isinstance(q.shape[1], int)):
        return False
    queries, keys = str(q.shape[-2]), str(k.shape[-2])
    return queries != "1" and (queries == keys or not causal) and all(t.stride(-1) == 1 for t in (q, k, v))


def _are_plain(*tensors: torch.Tensor) -> bool:
    """Whether none of them is a DTensor or another subclass."""
    return all(type(tensor) is FakeTensor for tensor in tensors)


def _unrepeated(node: Any) -> Any:
    """``x`` of ``x[:, :, None].expand(b, heads, times, s, d).reshape(b, heads * times, s, d)``; else the node."""
    if not (_is_method(node, "reshape") and _is_method(node.args[0], "expand")):
        return node
    single = node.args[0].args[0]
    if not (calls(single, "unsqueeze") or (calls(single, "getitem") and _only_inserts(single.args[1]))):
        return node
    x = single.args[0] if single.args else None
    values = [value_of(each) for each in (x, single, node.args[0], node)]
    return node if any(value is None for value in values) or not _repeat(*values) else x  # type: ignore[arg-type]


def _repeat(x: torch.Tensor, single: torch.Tensor, spread: torch.Tensor, joined: torch.Tensor) -> bool:
    """Whether ``x`` gets a dim behind its heads, which is spread and joined with them, by the shapes."""
    if (x.ndim, spread.ndim, joined.ndim) != (4, 5, 4):
        return False
    b, heads, s, d = map(str, x.shape)
    as_texts = [tuple(map(str, t.shape)) for t in (single, spread)]
    times = as_texts[1][2]
    if as_texts != [(b, heads, "1", s, d), (b, heads, times, s, d)]:
        return False
    whole = isinstance(x.shape[1], int) and joined.shape[1] == x.shape[1] * spread.shape[2]
    return whole and tuple(map(str, joined.shape[2:])) == (s, d)


def _only_inserts(index: Any) -> bool:
    """Whether an index only makes the third dim."""
    full = slice(None, None, None)
    return isinstance(index, tuple) and [each for each in index if each is not ...] in (
        [full, full, None], [full, full, None, full], [full, full, None, full, full],
    )  # fmt: skip


def _is_method(node: Any, name: str) -> bool:
    """Whether a node calls this method of a tensor, or ATen's operator of its name."""
    of_aten = isinstance(node, Node) and isinstance(node.target, torch._ops.OpOverload)
    return isinstance(node, Node) and (node.op == "call_method" or of_aten) and calls(node, name)


def _lowered(op: Any) -> Any:
    defined = define(op)
    defined.lower()
    return defined.overload


def _put(node: Node, emitter: Emitter, make: Any) -> bool:
    """Put what ``make`` returns in the place of a node, if it has its dtype and shape, and all that read it take it."""
    try:
        made = make()
    except (Refused, TypeError, ValueError, NotImplementedError, RuntimeError):
        emitter.undo()
        return False
    was, new = value_of(node), value_of(made)
    fits = was is not None and new is not None and was.dtype == new.dtype and str(was.shape) == str(new.shape)
    others = ({} if lie_alike(new, was) else relaid(node.graph, {node: new})) if fits else None  # type: ignore[arg-type]
    if others is None:
        emitter.undo()
        return False
    relay(others)
    node.replace_all_uses_with(made)
    return True
