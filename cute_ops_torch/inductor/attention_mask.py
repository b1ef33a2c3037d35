"""Remove attention masks that a graph computes from sizes alone, whose values are known when it is compiled.

Hugging Face's models compute a causal mask whenever they are compiled, and any mask keeps
``scaled_dot_product_attention`` from its flash kernel. A mask is removed only if its values, computed here with the
graph's own nodes, are exactly those of ``is_causal=True``, or mask nothing. Of a window the call keeps in mind which it
is, for our attention, which takes windows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from cute_ops.fusion.scores import band
from cute_ops_torch.inductor.fx import calls, changed, value_of

ALL, CAUSAL = (-1, -1), (-1, 0)
# Of `scaled_dot_product_attention`, in order.
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_KNOWN, _SIDES = "cute_ops_mask", "cute_ops_sides"  # in the meta of a mask, and of a call
MOST = 2**30  # bytes of a mask, or of a tensor that it is computed from

# Functions that give the same values at every call, on any device.
_PURE = (
    "arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like",
    "tril", "triu", "add", "sub", "mul", "floordiv", "neg", "diff", "cumsum", "abs", "sum", "max", "min",
    "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert", "inv", "logical_and", "logical_or",
    "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "where", "masked_fill", "clamp", "all", "any",
    "getitem", "view", "reshape", "flatten", "unflatten", "expand", "expand_as", "unsqueeze", "squeeze", "transpose",
    "permute", "contiguous", "clone", "repeat", "broadcast_to", "to", "bool", "long", "int", "type",
)  # fmt: skip


def replace_mask(graph: Graph, node: Any) -> bool:
    """Call attention with ``is_causal`` in place of a mask that says the same."""
    if not calls(node, "scaled_dot_product_attention") or node.op != "call_function":
        return False
    given = dict(zip(ARGUMENTS, node.args, strict=False)) | node.kwargs
    query, key = (value_of(given.get(name)) for name in ("query", "key"))
    if query is None or key is None or given.get("is_causal") or not is_mask(given.get("attn_mask"), query, key):
        return False
    sides = sides_of(graph, given["attn_mask"], node)
    node.meta[_SIDES] = sides
    if sides not in (ALL, CAUSAL) or (sides == CAUSAL and query.shape[-2] != key.shape[-2]):
        return False
    given = {**given, "attn_mask": None, "is_causal": sides == CAUSAL}
    node.args, node.kwargs = (given.pop("query"), given.pop("key"), given.pop("value")), given
    return True


def is_mask(mask: Any, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a node is a mask of torch's attention, of bools or added to scores, with a row for each query."""
    made = value_of(mask)
    if made is None or not (made.dtype == torch.bool or made.is_floating_point()):
        return False
    return made.shape[-2:] == (query.shape[-2], key.shape[-2])


def sides_of(graph: Graph, mask: Node, until: Node) -> tuple[int, int] | None:
    """How many keys before and after its own, counted from the last ones, each query of a call attends to by its mask,
    -1 for all; None if the mask is no such band, or is not known.
    """
    if _SIDES in until.meta:  # since when the mask's nodes may have been replaced
        return until.meta[_SIDES]  # type: ignore[no-any-return]
    nodes = _makers(graph, mask)
    if nodes is None or changed(graph, nodes[0], until):
        return None
    if _KNOWN not in mask.meta:
        mask.meta[_KNOWN] = _look(nodes)
    return mask.meta[_KNOWN]  # type: ignore[no-any-return]


def _makers(graph: Graph, mask: Node) -> list[Node] | None:
    """The nodes that compute a mask, in the graph's order; None if its values are not known at compile time."""
    found, waiting = {mask}, [mask]
    while waiting:
        node = waiting.pop()
        value = value_of(node)
        if not calls(node, *_PURE) or value is None or not all(isinstance(s, int) for s in value.shape):
            return None
        if math.prod(value.shape) * value.dtype.itemsize > MOST:
            return None
        for one in node.all_input_nodes:
            if one not in found:
                found.add(one)
                waiting.append(one)
    return [node for node in graph.nodes if node in found]


def known_value(graph: Graph, node: Node) -> torch.Tensor | None:
    """The value of a node that follows from sizes alone, computed on the CPU; None of others."""
    nodes = _makers(graph, node)
    return None if nodes is None or changed(graph, nodes[0], node) else _computed(nodes)


def _look(nodes: list[Node]) -> tuple[int, int] | None:
    """The sides of a mask, computed on the CPU."""
    mask = _computed(nodes)
    if mask.is_floating_point():  # what is added to scores
        if not bool(((mask == 0) | (mask == -math.inf)).all()):
            return None
        mask = mask == 0
    if mask.all():
        return ALL
    rows, columns = mask.shape[-2:]
    first = mask[(0,) * (mask.ndim - 2)]
    return band(first.numpy(), rows, columns) if bool((mask == first).all()) else None


def _computed(nodes: list[Node]) -> torch.Tensor:
    """The value of the last of these nodes."""
    values: dict[Node, Any] = {}
    last = {one: node for node in nodes for one in node.all_input_nodes}

    def given(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    with _disable_current_modes(), torch.no_grad():
        for node in nodes:
            args, kwargs = map_aggregate(node.args, given), map_aggregate(dict(node.kwargs), given)
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for one in node.all_input_nodes:
                if last[one] is node:
                    del values[one]
        return values[nodes[-1]]  # type: ignore[no-any-return]
